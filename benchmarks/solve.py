"""A trajectory (n = 1024, d = 16, H = 4, beta = 4, T = 10) to a true error of 1e-5, by everyone who can integrate it.

Each contestant uses the loosest tolerance of its grid whose final tokens are within 1e-5 of a tight reference, so that
a fast wrong answer cannot win; the error and the number of evaluations stand beside the time.
"""

import diffrax as dfx
import jax
import jax.numpy as jnp
import numpy as np

import attnflow as af
from attnflow.reduce import Blocked

from .measure import NotRun, Recorder
from .reduction import tokens
from .rivals import module, torch_here

STRENGTHS = (1.0, 0.75, 0.5, 0.25)
BETA, T, TARGET = 4.0, 10.0, 1e-5
STAGES = 6  # evaluations per step of Tsit5
TOLERANCES = [1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 3e-6, 1e-6, 3e-7, 1e-7, 1e-8]


def main(recorder: Recorder) -> None:
    n, d, end = (64, 4, 1.0) if recorder.tiny else (1024, 16, T)
    for dtype in ("float32",) if recorder.tiny else ("float64", "float32"):
        x0 = tokens(n, d, dtype)
        reference = _attnflow(x0.astype(np.float64), end, None, dfx.Dopri8())(1e-11)[0]
        integrators = {
            "attnflow": _attnflow(x0, end, None, None),
            "attnflow, float32 tiles": _attnflow(x0, end, Blocked(tile_dtype="float32"), None)
            if dtype == "float64"
            else None,
            "jax naive + diffrax": _naive_diffrax(x0, end),
            "torchdiffeq + sdpa": _torchdiffeq(x0, end, explicit=False),
            "torchdiffeq + explicit softmax": _torchdiffeq(x0, end, explicit=True),
            "numpy + scipy": _scipy(x0, end),
        }
        calls, used = {}, {}
        integrators = {name: integrate for name, integrate in integrators.items() if integrate is not None}
        for name, integrate in integrators.items():
            if isinstance(integrate, NotRun):
                calls[name] = integrate
            else:  # the same steps with another attention need the same tolerance
                start = used.get("torchdiffeq + sdpa", TOLERANCES[0]) if "explicit" in name else TOLERANCES[0]
                start = 1e-4 if "scipy" in name else start  # looser, its tokens leave the sphere and overflow
                calls[name], used[name] = _to_target(integrate, reference, start)
        off = lambda got, reference=reference: np.max(np.abs(got[0] - reference))  # noqa: E731
        recorder.contest(
            "trajectory",
            {"n": n, "d": d, "heads": len(STRENGTHS), "beta": BETA, "T": end, "dtype": dtype, "target": TARGET},
            calls,
            error=off,
            extra=lambda got: {"evaluations": got[1], "rtol": got[2]},
        )


def _to_target(integrate, reference, start):
    """(call, tolerance) with the loosest tolerance, from `start` on, that meets the target."""
    for tolerance in TOLERANCES[TOLERANCES.index(start) :]:
        final, _ = integrate(tolerance)
        if np.max(np.abs(final - reference)) <= TARGET:
            return (lambda tolerance=tolerance: (*integrate(tolerance), tolerance)), tolerance
    return NotRun(f"no tolerance meets {TARGET}"), start


def _attnflow(x0, end, reduction, solver):
    field = af.AttentionField(af.ScalarHeads(STRENGTHS), af.Softmax(BETA), reduction=reduction)
    ts = np.array([0.0, end], x0.dtype)

    def integrate(rtol):
        traj = af.solve(field, x0, ts, rtol=rtol, atol=1e-3 * rtol, solver=solver)
        return np.asarray(traj.final), STAGES * int(traj.stats["steps"])

    return integrate


def _naive_velocity(x):
    push = jnp.zeros_like(x)
    for strength in STRENGTHS:
        lam = jnp.asarray(strength, x.dtype)
        p = jax.nn.softmax(jnp.asarray(BETA, x.dtype) * lam * (x @ x.T), axis=1)
        push = push + lam * (p @ x)
    return push - jnp.sum(push * x, axis=1, keepdims=True) * x


def _naive_diffrax(x0, end):
    term = dfx.ODETerm(lambda t, x, args: _naive_velocity(x))

    @jax.jit
    def run(x0, rtol):
        controller = dfx.PIDController(rtol=rtol, atol=rtol / 1000)
        times = [jnp.asarray(t, x0.dtype) for t in (0.0, end)]
        solution = dfx.diffeqsolve(term, dfx.Tsit5(), *times, None, x0, stepsize_controller=controller, max_steps=4096)
        return solution.ys[-1], solution.stats["num_steps"]

    def integrate(rtol):
        final, steps = run(jnp.asarray(x0), jnp.asarray(rtol, x0.dtype))
        return np.asarray(final), STAGES * int(steps)

    return integrate


def _torchdiffeq(x0, end, explicit):
    torch, library = torch_here(), module("torchdiffeq")
    for found in (torch, library):
        if isinstance(found, NotRun):
            return found
    strengths = torch.tensor(STRENGTHS, dtype=torch.from_numpy(x0).dtype)[:, None, None]

    def velocity(t, x):
        q = BETA * strengths * x
        if explicit:
            mean = torch.softmax(q @ x.T, dim=-1) @ x
        else:
            keys = x[None].expand(len(STRENGTHS), -1, -1)
            mean = torch.nn.functional.scaled_dot_product_attention(q[None], keys[None], keys[None], scale=1.0)[0]
        push = (strengths * mean).sum(0)
        return push - (push * x).sum(1, keepdim=True) * x

    def integrate(rtol):
        calls = 0

        def counted(t, x):
            nonlocal calls
            calls += 1
            return velocity(t, x)

        with torch.no_grad():
            start, times = torch.from_numpy(x0), torch.tensor([0.0, end], dtype=torch.from_numpy(x0).dtype)
            try:
                final = library.odeint(counted, start, times, rtol=rtol, atol=rtol / 1000, method="dopri5")[-1]
            except AssertionError:  # its step underflows
                final = torch.full_like(start, torch.nan)
        return final.numpy(), calls

    return integrate


def _scipy(x0, end):
    integrate_module = module("scipy.integrate")
    if isinstance(integrate_module, NotRun):
        return integrate_module

    def velocity(t, flat):
        x = flat.reshape(x0.shape).astype(x0.dtype)
        push = np.zeros_like(x)
        for strength in STRENGTHS:
            p = np.exp(BETA * strength * (x @ x.T))
            push += strength * ((p @ x) / p.sum(1, keepdims=True))
        return (push - np.sum(push * x, axis=1, keepdims=True) * x).ravel()

    def integrate(rtol):
        run = integrate_module.solve_ivp(velocity, (0.0, end), x0.ravel(), method="RK45", rtol=rtol, atol=rtol / 1000)
        return run.y[:, -1].reshape(x0.shape), run.nfev

    return integrate
