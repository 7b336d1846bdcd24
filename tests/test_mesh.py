"""One flow over many devices equals the flow on one: sums, fields, gradients, solves, and several processes."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from exact import close, velocity

from attnflow import observe, sphere
from attnflow.attention import Exponential, Hardmax, Linear, ReLU, Softmax
from attnflow.field import AttentionField
from attnflow.heads import FactoredHeads, Heads
from attnflow.mesh import pad, spread, supervise, token_mesh, token_sharding, whole
from attnflow.reduce import Blocked, Dense
from attnflow.sharded import Sharded
from attnflow.solve import solve

KINDS = {
    "softmax": Softmax(2.0), "exponential": Exponential(2.0), "relu": ReLU(), "linear": Linear(), "hardmax": Hardmax()
}  # fmt: skip
WAYS = {"ring": True, "gathered": False}


def system(key, n, dtype=np.float64, *, d=3, count=2):
    one, two, three, four = jr.split(key, 4)
    x = sphere.uniform(one, n=n, d=d).astype(dtype)
    heads = Heads(jr.normal(two, (count, d, d), dtype), jr.normal(three, (count, d, d), dtype))
    weights = jr.uniform(four, (n,), dtype)
    return x, heads, weights / jnp.sum(weights)


@eqx.filter_jit
def velocities(x, *fields):
    return [field(0.0, x) for field in fields]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("kind", "n"), [("softmax", 16), ("softmax", 3), *((kind, 13) for kind in KINDS)])
def test_the_field_over_four_devices_is_the_papers_formula(key, kind, n, causal):
    x, heads, weights = system(key, n)
    expected = velocity(kind, x, heads.score, heads.value, w=weights, beta=2.0, causal=causal)
    ways = [Sharded(token_mesh(), Dense(), ring=ring) for ring in WAYS.values()]
    fields = [AttentionField(heads, KINDS[kind], weights, causal=causal, reduction=way) for way in ways]
    for v in velocities(x, *fields):
        assert close(v, expected, eps=1e-6)


@pytest.mark.parametrize(
    ("dtype", "inner", "causal", "way"),
    [
        (np.float64, Dense(), False, "ring"),
        (np.float64, Blocked(), True, "ring"),
        (np.float32, Blocked(), False, "gathered"),
        (np.float32, Dense(), True, "ring"),
    ],
)
def test_values_and_gradients_equal_those_of_one_device(key, dtype, inner, causal, way):
    x, heads, weights = system(key, 14, dtype)

    def loss(moving, reduction):
        x, heads, weights = moving
        field = AttentionField(heads, Softmax(2.0), causal=causal, reduction=reduction)
        field = eqx.tree_at(lambda f: f.weights, field, weights, is_leaf=lambda a: a is None)
        return jnp.sum(field(0.0, x) ** 3) + jnp.sum(observe.entropy_deficit(field, x))

    sharded = jax.jit(jax.value_and_grad(lambda m: loss(m, Sharded(token_mesh(), inner, ring=WAYS[way]))))
    single = jax.jit(jax.value_and_grad(lambda m: loss(m, Dense())))
    for a, b in zip(
        jax.tree.leaves(sharded((x, heads, weights))), jax.tree.leaves(single((x, heads, weights))), strict=True
    ):
        assert a.dtype == dtype and close(a, b, eps=0.1 if dtype == np.float32 else 1e-5)


def test_heads_with_keys_of_their_own_go_round_the_ring(key):
    keys = jr.split(key, 5)
    heads = FactoredHeads(*(jr.normal(k, (2, 2, 4)) for k in keys[:3]), jr.normal(keys[3], (2, 4, 2)))
    x = sphere.uniform(keys[4], n=10, d=4)
    many = AttentionField(heads, Softmax(1.5), reduction=Sharded(token_mesh(), Dense()))
    one = AttentionField(heads, Softmax(1.5), reduction=Dense())
    assert close(*velocities(x, many, one), eps=1e-6)


def test_scores_of_any_size_combine_without_overflow(key):
    x, heads, _ = system(key, 12)
    many = AttentionField(heads, Softmax(1e4), reduction=Sharded(token_mesh(), Dense()))
    one = AttentionField(heads, Softmax(1e4), reduction=Dense())
    assert close(*velocities(x, many, one), eps=1e-3)


def test_a_solve_over_spread_tokens_takes_the_steps_of_one_device(key):
    x, heads, _ = system(key, 16)
    ts = jnp.linspace(0.0, 1.0, 4)
    mesh = token_mesh()

    def flow(x, reduction):
        field = AttentionField(heads, Softmax(2.0), reduction=reduction)
        return solve(field, x, ts, observe={"cosine": observe.mean_cosine}, rtol=1e-8)

    one, many = flow(x, Dense()), flow(spread(x, mesh), Sharded(mesh, Dense()))
    assert int(one.stats["steps"]) == int(many.stats["steps"])
    assert close(whole(many.final), one.final, eps=1e-5)
    assert close(many.values["cosine"], one.values["cosine"], eps=1e-5)


@pytest.mark.slow
def test_the_gradient_of_a_sharded_solve_is_that_of_one_device(key):
    x, heads, _ = system(key, 8)
    ts = jnp.linspace(0.0, 0.5, 2)

    def loss(heads, x, reduction):
        return jnp.sum(solve(AttentionField(heads, Softmax(1.0), reduction=reduction), x, ts).final ** 3)

    mesh = token_mesh()
    one = jax.jit(jax.grad(lambda h: loss(h, x, Dense())))(heads)
    many = jax.jit(jax.grad(lambda h: loss(h, x, Sharded(mesh, Dense()))))(heads)
    assert close(many.score, one.score, eps=1e-4) and close(many.value, one.value, eps=1e-4)


def test_spread_tokens_lie_on_all_devices_and_keep_to_them(key):
    x, _, _ = system(key, 8)
    mesh = token_mesh()
    placed = spread(x, mesh)
    assert placed.sharding == token_sharding(mesh) and {s.data.shape for s in placed.addressable_shards} == {(2, 3)}
    field = AttentionField(system(key, 8)[1], Softmax(1.0), reduction=Sharded(mesh))
    assert len(jax.jit(lambda x: field(0.0, x))(placed).sharding.device_set) == 4
    with pytest.raises(ValueError, match="7 tokens do not split over 4 devices: `pad`"):
        spread(x[:7], mesh)


def test_padding_moves_nothing(key):
    x, heads, weights = system(key, 6)
    y, w = pad(x, weights, parts=4)
    assert y.shape == (8, 3) and w[6:].tolist() == [0.0, 0.0]
    for attention in KINDS.values():
        (expected,) = velocities(x, AttentionField(heads, attention, weights, reduction=Dense()))
        (found,) = velocities(y, AttentionField(heads, attention, w, reduction=Dense()))
        assert close(found, jnp.concatenate([expected, expected[:1], expected[:1]]), eps=1e-7)
    assert pad(x, parts=3)[0] is not None and pad(x, parts=3)[1].tolist() == [1 / 6] * 6
    with pytest.raises(ValueError, match=r"`weights` must have shape \(6,\)"):
        pad(x, weights[:5], parts=4)


EIGHT = """
import os, sys, json
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, jax.numpy as jnp, jax.random as jr, numpy as np
jax.config.update("jax_enable_x64", True)
from attnflow import sphere
from attnflow.attention import Softmax
from attnflow.field import AttentionField
from attnflow.heads import AlignedHeads
from attnflow.mesh import spread, token_mesh, whole
from attnflow.reduce import Blocked
from attnflow.sharded import Sharded
from attnflow.solve import solve
x = sphere.uniform(jr.key(1), n=64, d=8)
heads = AlignedHeads(jr.normal(jr.key(2), (4, 8, 8)) / 3)
ts = np.linspace(0.0, 1.0, 3)
def final(heads, x, reduction):
    return solve(AttentionField(heads, Softmax(1.0), reduction=reduction), x, ts, rtol=1e-8, throw=False).final
def loss(heads, x, reduction):
    return jnp.sum(final(heads, x, reduction) ** 3)
mesh, out = token_mesh(), {"devices": len(jax.devices())}
one = jax.jit(lambda h: (final(h, x, Blocked()), jax.grad(loss)(h, x, Blocked()).raw))(heads)
for ring in (True, False):
    many = jax.jit(lambda h, x: (final(h, x, Sharded(mesh, ring=ring)), jax.grad(loss)(h, x, Sharded(mesh, ring=ring)).raw))
    many = many(heads, spread(x, mesh))
    out[f"ring {ring}"] = [float(jnp.max(jnp.abs(whole(a) - b)) / jnp.max(jnp.abs(b))) for a, b in zip(many, one)]
print(json.dumps(out))
"""


@pytest.mark.slow
def test_eight_devices_equal_one_in_value_and_gradient():
    done = subprocess.run([sys.executable, "-c", EIGHT], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    assert out["devices"] == 8
    for way in ("ring True", "ring False"):
        value, gradient = out[way]
        assert value < 1e-13 and gradient < 1e-12


MEMBER = """
import json, sys
import jax
jax.config.update("jax_enable_x64", True)
from attnflow import mesh
address, processes, rank, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if processes > 1:
    mesh.start(address, processes=processes, rank=rank, patience=20)
import numpy as np
import jax.random as jr
from attnflow import sphere
from attnflow.attention import Softmax
from attnflow.field import AttentionField
from attnflow.heads import ScalarHeads
from attnflow.sharded import Sharded
from attnflow.solve import solve
x = sphere.uniform(jr.key(1), n=16, d=3)
devices = mesh.token_mesh()
field = AttentionField(ScalarHeads([1.0, -0.5]), Softmax(2.0), reduction=Sharded(devices))
flow = jax.jit(lambda x: solve(field, x, np.linspace(0.0, 2.0, 3), rtol=1e-8, throw=False).final)
final = mesh.whole(flow(mesh.spread(x, devices)))
if rank == 0:
    np.save(out, final)
print(rank, "of", len(jax.devices()), flush=True)
if sys.argv[5:] == ["die"]:
    import os, signal, time
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
"""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def members(tmp_path, processes, *more):
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    address = f"127.0.0.1:{free_port()}"
    out = tmp_path / f"{processes}.npy"
    return out, [
        [sys.executable, str(script), address, str(processes), str(r), str(out), *more] for r in range(processes)
    ]


@pytest.fixture
def one_device(monkeypatch):
    """Processes started here see the one device that they have."""
    monkeypatch.setenv("XLA_FLAGS", "")


@pytest.mark.slow
def test_two_processes_over_the_loopback_equal_one(tmp_path, one_device):
    results = []
    for processes in (1, 2):
        out, commands = members(tmp_path, processes)
        assert supervise(commands) == 0
        results.append(np.load(out))
    assert close(results[1], results[0], eps=1e-5)


@pytest.mark.slow
def test_when_one_process_dies_none_is_left(tmp_path, one_device):
    _, commands = members(tmp_path, 2, "die")
    assert supervise(commands) == -9
    time.sleep(0.2)
    alive = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in _read(p)]
    assert alive == []


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_supervise_returns_zero_when_all_do_and_kills_the_rest_when_one_fails():
    assert supervise([[sys.executable, "-c", "pass"]] * 2) == 0
    started = time.monotonic()
    sleeper = [sys.executable, "-c", "import time; time.sleep(100)"]
    assert supervise([sleeper, [sys.executable, "-c", "import sys; sys.exit(3)"]]) == 3
    assert time.monotonic() - started < 90
