"""One large flow over many devices: meshes, placed and padded tokens, several processes and hosts.

The same source runs on CPU and GPU. A flow is spread by giving its field the reduction `Sharded(mesh)` and
placing its tokens with `spread`; the step control sees the whole flow, since only the sums are split.
"""

import subprocess
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

TOKEN = "token"


def token_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """All devices, of all processes, in a row along which tokens are split.

    Its axis is of the automatic kind: XLA propagates shardings, and plain arrays are welcome.
    """
    devices = jax.devices() if devices is None else devices
    return Mesh(np.asarray(devices), (TOKEN,), axis_types=(AxisType.Auto,))


def token_sharding(mesh: Mesh) -> NamedSharding:
    """Tokens (n, d) or weights (n,) split along n."""
    return NamedSharding(mesh, P(TOKEN))


def pad(
    x: Float[Array, "n d"], weights: Array | None = None, *, parts: int
) -> tuple[Float[Array, "m d"], Float[Array, " m"]]:
    """Tokens and weights lengthened to a multiple of `parts` by copies of token 0 with weight 0.

    The copies move as token 0 does and enter no sum: the flow of the others is unchanged. `weights` default to 1/n.
    """
    n = x.shape[0]
    if n == 0:
        raise ValueError("`x` must have at least one token to pad with.")
    weights = jnp.full(n, 1 / n, x.dtype) if weights is None else weights
    if weights.shape != (n,):
        raise ValueError(f"`weights` must have shape ({n},), got {weights.shape}.")
    extra = -n % parts
    return jnp.concatenate([x, jnp.repeat(x[:1], extra, axis=0)]), jnp.pad(weights, (0, extra))


def spread(x: Array, mesh: Mesh) -> Array:
    """The same array split over the mesh along its first axis; every process passes the whole array.

    ValueError where n is no multiple of the number of devices: `pad` first.
    """
    if x.shape[0] % mesh.size:
        raise ValueError(f"{x.shape[0]} tokens do not split over {mesh.size} devices: `pad` them first.")
    host = np.asarray(x)
    return jax.make_array_from_callback(x.shape, token_sharding(mesh), lambda index: host[index])


def whole(x: Array) -> np.ndarray:
    """A spread array on the host of every process; all processes must call it together."""
    if x.is_fully_addressable:
        return np.asarray(x)
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def start(address: str | None = None, *, processes: int | None = None, rank: int | None = None, patience: int = 30):
    """Join the processes of one flow, before any other use of JAX; under Slurm or Open MPI without arguments.

    `address` is host:port of rank 0. When a process dies or freezes the others are aborted within `patience` seconds:
    JAX does not recover, so start all again from the last checkpoint (`supervise` ends what is left).
    """
    jax.distributed.initialize(
        address,
        num_processes=processes,
        process_id=rank,
        heartbeat_timeout_seconds=patience,
        shutdown_timeout_seconds=patience,
        initialization_timeout=10 * patience,
    )


def supervise(commands: Sequence[Sequence[str]], *, poll: float = 0.1) -> int:
    """Run the processes of one flow on this machine; when one fails, kill the rest. Exit code 0 or the failure's."""
    children = [subprocess.Popen(list(command)) for command in commands]
    try:
        while True:
            codes = [child.poll() for child in children]
            failed = [code for code in codes if code]
            if failed or None not in codes:
                return failed[0] if failed else 0
            time.sleep(poll)
    finally:
        for child in children:
            child.kill()
            child.wait()
