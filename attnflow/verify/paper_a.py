"""The statements of arXiv 2605.10931, each inside its hypothesis and where it is known to fail."""

from collections.abc import Iterator

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from .. import claims, observe, sphere
from ..attention import Softmax
from ..claims.claim import at_most, equal
from ..field import AttentionField, ZeroTemperatureField
from ..heads import Heads, ScalarHeads
from ..reduce import Dense
from ..solve import solve
from ..theory import laplace, low_temperature
from .row import Row, row

SOURCE = "arXiv 2605.10931"


def assumptions() -> Iterator[Row]:
    x = sphere.circle(jnp.linspace(0.1, 6.0, 50))
    good = AttentionField(_head([1.0, 4.0], [1.0, 0.5]), Softmax(8.0))
    skew = AttentionField(Heads(jnp.eye(2)[None], jnp.array([[[1.0, 0.0], [0.5, 0.2]]])), Softmax(8.0))
    yield row("A", "Assumption 1", "V = diag(1, .5), B = diag(1, 4)", claims.assumption_1(good, x))
    yield row("A", "Assumption 1", "V B^T not symmetric", claims.assumption_1(skew, x), expected=False)
    yield row("A", "Assumption 2: finite moment of tan", "p = 1/2, m = 1", claims.assumption_2(good, x, moment=0.5))
    naive = claims.assumption_2(good, x, moment=2.0)
    yield row("A", "Assumption 2: finite moment of tan", "p = 2, m = 1, with Assumption 3", naive, expected=False)
    theta = np.linspace(0, 2 * np.pi, 361)
    positive, touching = (jnp.asarray(1 + a * np.cos(theta - 0.7)) for a in (0.3, 1.0))
    yield row("A", "Assumption 3: density > 0", "1 + .3 cos(theta - .7)", claims.assumption_3(positive))
    zero = claims.assumption_3(jnp.round(touching, 4))
    yield row("A", "Assumption 3: density > 0", "1 + cos(theta - .7)", zero, expected=False)


def zero_temperature() -> Iterator[Row]:
    x = sphere.uniform(jr.key(31), 60, 3)
    A = jnp.array([[3.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, -1.0]])
    field = ZeroTemperatureField(Heads(jnp.eye(3)[None], A[None]))
    yield row("A", "W2(rho, Pi#rho)^2 = 2 - 2 E|P1 x|", "60 tokens on S^2", claims.projection_distance(field, x))
    nodes, w = sphere.circle_quadrature(np.ones_like, 4000)
    flow = low_temperature.zero_temperature_flow(_head([1.0, 1.0], [1.0, 0.0]), nodes, 2.0)
    measured = low_temperature.zero_temperature_w2(_head([1.0, 1.0], [1.0, 0.0]), flow, w)
    exact = low_temperature.uniform_w2(2, 1, 2.0)
    yield row(
        "A", "W2 of the uniform law at time t", "d = 2, gamma t = 2", equal(measured, exact, "", SOURCE, tolerance=1e-5)
    )

    name = "Corollary 2: rate of W2"
    times = jnp.array([30.0, 40.0])
    tail = _tail()
    for b, rate, naive in (((4.0, 1.0), 0.25, 0.25), ((1.0, 4.0), 0.125, 0.25), ((1.0, 1.0), 0.5, 1.0)):
        heads = _head(b, [2.0 / b[0], 1.0 / b[1]])
        field = ZeroTemperatureField(heads, tail[1])
        decay = float(low_temperature.projection_rate(heads))
        fits = claims.corollary_2(field, tail[0], times, decay=decay, tolerance=0.01)
        yield row("A", name, f"B = diag({b[0]:g}, {b[1]:g}): min(gamma/2b2, gamma/b1) = {rate:g}", fits)
        path = claims.corollary_2(
            field, tail[0], times, decay=float(low_temperature.pathwise_rate(heads)), tolerance=0.01
        )
        regime = f"B = diag({b[0]:g}, {b[1]:g}): gamma/|B| = {naive:g}"
        yield row("A", name, regime, path, expected=rate == naive)


def laplace_principle() -> Iterator[Row]:
    name = "Laplace principle: |m - y*|"
    uniform, w = sphere.circle_quadrature(np.ones_like, 400)
    heads = _head([1.0, 2.0], [1.0, 1.0])
    field = AttentionField(heads, Softmax(20.0), w)
    exact = claims.laplace_mean_of_uniform(field, uniform, tolerance=1e-10)
    yield row("A", "softmax mean of the uniform law is A_d(kappa) y*", "circle, beta = 20", exact)
    tilted, w = sphere.circle_quadrature(lambda theta: 1 + 0.3 * np.cos(theta - 0.7), 1200)
    error = {}
    for beta in (50.0, 200.0):
        claim = claims.laplace_principle(AttentionField(heads, Softmax(beta), w), tilted, constant=1.0)
        yield row("A", f"{name} <= sqrt(log(beta+1)/beta)", f"density 1 + .3 cos, beta = {beta:g}", claim)
        error[beta] = claim.lhs
    slope = jnp.log(error[200.0] / error[50.0]) / jnp.log(4.0)
    true = equal(slope, -1.0, "smooth density", SOURCE, tolerance=0.05)
    yield row("A", f"{name} ~ beta^slope", "slope -1", true)
    half = equal(slope, -0.5, "smooth density", SOURCE, tolerance=0.05)
    yield row("A", f"{name} ~ beta^slope", "slope -1/2", half, expected=False)
    width = jnp.log(laplace.gibbs_w2(2, 200.0) / laplace.gibbs_w2(2, 50.0)) / jnp.log(4.0)
    gibbs = equal(width, -0.5, "", SOURCE, tolerance=0.01)
    yield row("A", "W2 of the Gibbs law from its mode ~ beta^slope", "slope -1/2", gibbs)


def phases() -> Iterator[Row]:
    beta, ts = 8.0, jnp.linspace(0.0, 24.0, 97)
    heads = _head([1.0, 4.0], [1.0, 0.5])
    nodes, w = sphere.circle_quadrature(
        lambda theta: 1 + 0.3 * np.cos(theta - 0.7), 480, refine=(0.0, np.pi), smallest=1e-3
    )
    field = AttentionField(heads, Softmax(beta), w)
    run = solve(field, nodes, ts, observe={"space": _to_axis(1), "terminal": _to_axis(0)}, save_tokens=True)
    space, terminal = run.values["space"], run.values["terminal"]
    order = claims.three_phases(ts, space, terminal)
    yield row("A", "three phases in order", "case V = diag(1, .5), B = diag(1, 4), beta = 8", order)
    least = jnp.argmin(space)
    depth = equal(space[least], 0.1696, "", SOURCE, tolerance=0.01)
    yield row("A", "least sqrt(2 - 2 E|P1 x|) of the run", "beta = 8: .1696", depth)
    growth = float(low_temperature.field_growth(heads, nodes))
    decay = float(low_temperature.projection_rate(heads))
    frame = jnp.argmin(jnp.abs(ts - low_temperature.best_time(beta, growth, decay)))
    tokens, t = run.values["tokens"][frame], float(ts[frame])
    bound = claims.theorem_1(field, nodes, tokens, t=t, growth=growth, decay=decay, constant=1.0)
    yield row("A", "Theorem 1: W2(rho_t, Pi#rho_0) <= bound", f"beta = 8, t = {t:g}, C = 1", bound)

    same = AttentionField(_head([1.0, 4.0], [0.5, 1.0]), Softmax(beta), w)
    stay = solve(same, nodes, ts, observe={"space": _to_axis(1), "terminal": _to_axis(0)})
    none = claims.three_phases(ts, stay.values["space"], stay.values["terminal"])
    yield row("A", "three phases in order", "V and V B^T lead with one vector: no departure", none, expected=False)


def terminal_states() -> Iterator[Row]:
    name = "Hypothesis 1: rest on the top eigenspace of V"
    half = np.random.default_rng(3).uniform(0, np.pi, 32)
    x0 = sphere.circle(jnp.asarray(np.concatenate([half, half + np.pi])))  # symmetric under x -> -x
    ts = jnp.array([0.0, 60.0])
    for V, B, regime, holds in (
        ((1.0, 0.5), (1.0, 1.0), "V = diag(1, .5), B = I", True),
        ((1.0, -2.0), (1.0, -2.0), "V = B = diag(1, -2): by modulus", True),
        ((-1.0, -2.0), (-1.0, 2.0), "V = diag(-1, -2), B = diag(-1, 2)", False),
    ):
        field = AttentionField(_head(B, V), Softmax(8.0))
        run = solve(field, x0, ts, max_steps=20000)
        claim = claims.hypothesis_1(field, run.final, tolerance=1e-3)
        yield row("A", name, regime, claim, expected=holds)
    angle = jnp.degrees(jnp.arctan(jnp.abs(run.final[:, 1] / run.final[:, 0])))
    halt = equal(angle, jnp.degrees(jnp.arctan(jnp.sqrt(0.5))), "", SOURCE, tolerance=1e-4)
    yield row("A", "clusters halt where x^T B x = 0", "the same: 35.264 degrees", halt)
    c, s = np.cos(np.pi / 3), np.sin(np.pi / 3)
    turn = jnp.array([[[c, -s], [s, c]]])
    V = jnp.diag(jnp.array([2.0, 1.0]))[None] @ jnp.swapaxes(turn, 1, 2)
    field = AttentionField(Heads(jnp.swapaxes(turn, 1, 2), V), Softmax(8.0))
    turning = claims.hypothesis_1(field, solve(field, x0, ts).final, tolerance=1e-3)
    yield row("A", name, "V with complex eigenvalues", turning, expected=False)


def resolution() -> Iterator[Row]:
    name = "nodes resolve the kernel: spacing < .3/sqrt(beta |B^T x|)"
    heads = _head([1.0, 4.0], [1.0, 0.5])
    for n, holds in ((1200, True), (100, False)):
        nodes, w = sphere.circle_quadrature(np.ones_like, n)
        ratio = observe.resolution(AttentionField(heads, Softmax(128.0), w), nodes)
        claim = at_most(ratio, 1.0, "a quadrature of the mean field", SOURCE)
        yield row("A", name, f"{n} uniform nodes, beta = 128", claim, expected=holds)
    name = "speed of two tokens at 90 degrees, beta = 40"
    slow = jnp.exp(-40.0) / (1 + jnp.exp(-40.0))
    pair = sphere.circle(jnp.array([0.3, 0.3 + jnp.pi / 2]))
    for reduction, regime in ((None, "difference form"), (Dense(), "plain sums: lost in rounding")):
        field = AttentionField(ScalarHeads([1.0]), Softmax(40.0), reduction=reduction)
        claim = equal(observe.speed(field, pair), slow, "no rounding of the drift", SOURCE, tolerance=1e-6)
        yield row("A", name, regime, claim, expected=reduction is None)


def _head(b, v):
    """One head with B = diag(b) and V = diag(v)."""
    return Heads(jnp.diag(jnp.array(b))[None], jnp.diag(jnp.array(v))[None])


def _to_axis(k):
    def distance(field, x):
        return jnp.sqrt(2 * field.token_weights(x) @ (1 - jnp.minimum(jnp.abs(x[:, k]), 1)))

    return distance


def _tail():
    """Nodes of the uniform law on the circle between the two axes, graded down to e^-100 from the second."""
    y = jnp.linspace(-100.0, jnp.log(jnp.pi / 2), 2001)
    w = jnp.exp(y)
    return jnp.stack([jnp.sin(w), jnp.cos(w)], axis=1), w / jnp.sum(w)


PARTS = (assumptions, zero_temperature, laplace_principle, phases, terminal_states, resolution)
