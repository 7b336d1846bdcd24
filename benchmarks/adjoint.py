"""Gradients through `solve`: time of each adjoint relative to the forward pass, its error, and memory per stored step.

The error is that of the derivative of the loss along the heads, against forward mode in float64 at a hundredth of the
tolerance. Solving backwards (`BacksolveAdjoint`) stands here to show why it is not the default.
"""

import diffrax as dfx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import attnflow as af
from attnflow.heads import goe

from .measure import Recorder

H, BETA, END, RTOL = 4, 2.0, 5.0, 1e-6
CASES = [(256, 8), (512, 16)]


def main(recorder: Recorder) -> None:
    for n, d in [(24, 3)] if recorder.tiny else CASES:
        times(recorder, n, d)
    memory(recorder, (16, 32) if recorder.tiny else (256, 512, 1024), 3 if recorder.tiny else 8)


def job(n: int, d: int):
    """(loss of the heads' parameters, a cubic of the tokens at the end; the tokens at the start; the parameters)."""
    x0, raw = af.sphere.uniform(jr.key(0), n, d), goe(jr.key(1), H, d).raw

    def loss(raw, adjoint=None, rtol=RTOL):
        field = af.AttentionField(af.AlignedHeads(raw), af.Softmax(BETA))
        traj = af.solve(field, x0, jnp.array([0.0, END]), rtol=rtol, atol=1e-3 * rtol, adjoint=adjoint, throw=False)
        return jnp.sum(traj.final[:, 0] ** 3), traj.stats["steps"]

    return loss, x0, raw


def times(recorder: Recorder, n: int, d: int) -> None:
    loss, x0, raw = job(n, d)
    value = lambda raw, adjoint=None, rtol=RTOL: loss(raw, adjoint, rtol)[0]  # noqa: E731
    forward = jax.jit(loss)
    steps = int(forward(raw)[1])

    def along(adjoint):
        gradient = jax.jit(jax.grad(lambda raw: value(raw, adjoint)))
        return lambda: np.asarray(jnp.sum(gradient(raw) * raw))

    def ahead(rtol):
        slope = jax.jit(lambda raw: jax.jvp(lambda s: value(s * raw, dfx.ForwardMode(), rtol), (1.0,), (1.0,))[1])
        return lambda: np.asarray(slope(raw))

    reference = float(ahead(RTOL / 100)())
    jobs = {
        "forward": lambda: np.asarray(forward(raw)[0])[None][:0],  # nothing to be wrong in
        "reverse": along(None),
        "reverse, a checkpoint per step": along(dfx.RecursiveCheckpointAdjoint(checkpoints=2 * steps)),
        "forward mode, one parameter": ahead(RTOL),
        "solved backwards": backwards(x0, raw),
    }
    params = {"n": n, "d": d, "heads": H, "T": END, "rtol": RTOL, "steps": steps}
    recorder.contest(
        "gradient of a solve", params, jobs, error=lambda got: abs(float(got) / reference - 1) if got.size else 0.0
    )


def backwards(x0, raw):
    """The same derivative by `BacksolveAdjoint`, which `solve` refuses: the flow contracts, so its past cannot be had back."""
    term = dfx.ODETerm(lambda t, x, raw: af.AttentionField(af.AlignedHeads(raw), af.Softmax(BETA))(t, x))
    controller = dfx.PIDController(rtol=RTOL, atol=1e-3 * RTOL, pcoeff=0.2, icoeff=0.4)

    @jax.jit
    def slope(raw):
        def loss(raw):
            done = dfx.diffeqsolve(
                term,
                dfx.Tsit5(),
                0.0,
                END,
                None,
                x0,
                raw,
                stepsize_controller=controller,
                adjoint=dfx.BacksolveAdjoint(),
            )
            return jnp.sum(done.ys[-1][:, 0] ** 3)

        return jnp.sum(jax.grad(loss)(raw) * raw)

    return lambda: np.asarray(slope(raw))


def memory(recorder: Recorder, sizes, d: int) -> None:
    """Bytes that XLA plans for a reverse pass, less those of one with fewer checkpoints, per checkpoint and token."""
    for n in sizes:
        loss, _, raw = job(n, d)

        def planned(checkpoints, loss=loss, raw=raw):
            adjoint = dfx.RecursiveCheckpointAdjoint(checkpoints=checkpoints)
            gradient = jax.jit(jax.grad(lambda raw: loss(raw, adjoint)[0]))
            return gradient.lower(raw).compile().memory_analysis().temp_size_in_bytes

        few, many = planned(8), planned(72)
        recorder.write(
            "memory of a stored step", "attnflow", {"n": n, "d": d},
            bytes_per_step=(many - few) / 64, bytes_per_step_and_token=(many - few) / 64 / n, planned_bytes=many,
        )  # fmt: skip
