"""The flow of a trained network: its Euler step is the network, its heads are those of the papers, its end is V's."""

from dataclasses import replace

import diffrax as dfx
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import CONFIGS, random_tensors, write_folder
from exact import close, relative_error, velocity

import attnflow.observe as ob
from attnflow import pretrained
from attnflow.pretrained.spectra import baseline
from attnflow.reduce import Blocked
from attnflow.solve import solve

IDS = [3, 1, 4, 1, 5, 9]


def open_tiny(kind, folder, **change):
    config = CONFIGS[kind] | change
    return pretrained.load(write_folder(folder / kind, config, random_tensors(config, seed=1)))


def unrotated(stack):
    """The same network without its rotary positions, which no field has."""

    def layer(number):
        found = stack.layer(number)
        return replace(found, attention=replace(found.attention, rotary=None))

    return pretrained.WeightStack(replace(stack.architecture, layer=layer))


def shared(seed=0, H=2, k=3, d=8, size=0.3, **options):
    """One RMS-normed layer of random heads."""
    q, key, v, o = baseline(H, k, d, seed=seed)
    return pretrained.from_arrays(size * q[None], size * key[None], v[None], o[None], centred=False, **options)


def sphere_tokens(n, d, seed=0):
    x = np.random.default_rng(seed).standard_normal((n, d))
    return jnp.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


@eqx.filter_jit
def push(field, t, u):
    return field.push(t, u)


@eqx.filter_jit
def step_of(field, state, t, step):
    """One step of the unprojected drift: retraction on the sphere, plain addition to a residual stream."""
    moved = step * field.push(t, field.directions(state))
    return state + moved if field.residual else field.directions(state + moved)


def euler(field, state, times, step):
    for t in times:
        state = step_of(field, state, jnp.asarray(t), jnp.asarray(step))
    return np.asarray(state)


# ---- the network ----


@pytest.mark.parametrize("kind", ["bert", "albert", "gpt2", "llama"])
def test_an_euler_step_of_the_flow_is_a_layer(tmp_path, kind):
    stack = unrotated(open_tiny(kind, tmp_path))
    passes = stack.layers(stack.embed(IDS))
    for number in range(1 if stack.shared else 0, len(stack)):  # ALBERT's first pass reads no norm
        for feed_forward, target in ((None, passes.middle[number]), ("split", passes.residual[number + 1])):
            field = stack.field(number, feed_forward=feed_forward)
            state = jnp.asarray(passes.residual[number] if field.residual else passes.tokens[number])
            end = euler(field, state, (0.0, 0.5), 0.5) if feed_forward else euler(field, state, (0.0,), 1.0)
            if stack.architecture.centred:
                end, target = (a - a.mean(axis=1, keepdims=True) for a in (end, target))
            if not field.residual:
                target = target / np.linalg.norm(target, axis=1, keepdims=True)
            assert np.abs(end - target).max() < 1e-10 * np.abs(target).max()


def test_the_whole_network_is_the_euler_scheme_of_the_whole_flow(tmp_path):
    for kind in ("bert", "gpt2"):
        stack = open_tiny(kind, tmp_path)
        passes = stack.layers(stack.embed(IDS))
        field = stack.field(feed_forward="split")
        state = jnp.asarray(passes.residual[0] if field.residual else passes.tokens[0])
        end = euler(field, state, np.arange(0, len(stack), 0.5), 0.5)
        end = end - end.mean(axis=1, keepdims=True)
        assert np.abs(end / np.linalg.norm(end, axis=1, keepdims=True) - passes.tokens[-1]).max() < 1e-10


def test_joint_blocks_add_where_split_ones_take_turns(tmp_path):
    stack = open_tiny("bert", tmp_path)
    u = jnp.asarray(stack.layers(stack.embed(IDS)).tokens[0])
    joint, split = (stack.field(0, feed_forward=how) for how in ("joint", "split"))
    assert close(
        push(joint, jnp.asarray(0.3), u), (push(split, jnp.asarray(0.0), u) + push(split, jnp.asarray(0.5), u)) / 2
    )
    assert close(push(split, jnp.asarray(0.2), u), 2 * push(stack.field(0), jnp.asarray(0.0), u))


def test_layers_take_over_at_their_times(tmp_path):
    stack = open_tiny("gpt2", tmp_path)
    x = jnp.asarray(stack.embed(IDS))
    field = stack.field()
    for t, number in ((-1.0, 0), (0.0, 0), (0.999, 0), (1.0, 1), (2.5, 2), (7.0, 2)):
        assert np.array_equal(field(t, x), stack.field(number)(0.0, x))
    assert np.array_equal(field.jumps, [1, 2])
    assert np.array_equal(stack.field(feed_forward="split").jumps, [0.5, 1, 1.5, 2, 2.5])
    picked = stack.field([2, 0])
    assert np.array_equal(picked(0.5, x), stack.field(2)(0.0, x))


@pytest.mark.slow
def test_a_solve_across_layers_is_that_of_each_in_turn(tmp_path):
    stack = open_tiny("bert", tmp_path)
    u = jnp.asarray(stack.layers(stack.embed(IDS)).tokens[0])
    field = stack.field()
    once = solve(field, u, jnp.array([0.0, 2.0]), controller=field.controller(1e-9, 1e-11)).final
    for number in range(2):
        u = solve(stack.field(number), u, jnp.array([0.0, 1.0]), rtol=1e-9, atol=1e-11).final
    assert np.abs(np.asarray(once - u)).max() < 1e-7


# ---- the papers' model ----


@pytest.mark.parametrize("causal", [False, True])
def test_without_affine_drift_the_flow_is_that_of_factored_heads(causal, dtype):
    stack = shared(causal=causal)
    x = sphere_tokens(7, 8).astype(dtype)
    field = stack.field(clock="residual-norm", affine=False)
    heads = field.attention(0.0).heads
    expected = velocity("softmax", x, heads.score, heads.value, causal=causal)
    found = field(0.0, x)
    assert found.dtype == dtype and close(found, expected.astype(dtype))
    assert close(eqx.filter_jit(field)(0.0, x), expected.astype(dtype))
    blocked = stack.field(clock="residual-norm", affine=False, reduction=Blocked(4, 4))
    assert close(blocked(0.0, x), expected.astype(dtype))


def test_gradients_of_the_flow_are_finite_differences(tmp_path):
    stack = open_tiny("gpt2", tmp_path)
    x = jnp.asarray(stack.embed(IDS))
    field = stack.field(feed_forward="split")
    direction = jax.random.normal(jax.random.key(0), x.shape)

    loss = jax.jit(lambda x: jnp.sum(field(1.2, x) ** 2))
    slope = (loss(x + 1e-6 * direction) - loss(x - 1e-6 * direction)) / 2e-6
    assert relative_error(jnp.sum(jax.jit(jax.grad(loss))(x) * direction), slope) < 1e-6
    batch = jnp.stack([x, 2 * x])
    assert close(jax.jit(jax.vmap(lambda y: field(0.2, y)))(batch)[1], eqx.filter_jit(field)(0.2, 2 * x))
    weights = eqx.filter_jit(eqx.filter_grad(lambda f: jnp.sum(f(0.2, x) ** 2)))(field)
    assert bool(jnp.any(weights.heads.query_bias[0] != 0)) and not bool(jnp.any(weights.heads.query_bias[1] != 0))


def test_the_field_is_homogeneous_of_degree_one_on_the_sphere(tmp_path):
    stack = open_tiny("bert", tmp_path)
    u = jnp.asarray(stack.layers(stack.embed(IDS)).tokens[0])
    field = stack.field()
    assert close(field(0.0, 3 * u), 3 * field(0.0, u))
    assert close(jnp.sum(field(0.0, u) * u, axis=1), np.zeros(6))


def test_key_biases_turn_scores_and_constants_push(tmp_path):
    stack = open_tiny("bert", tmp_path)
    u = jnp.asarray(stack.layers(stack.embed(IDS)).tokens[0])
    whole, bare = stack.field(0), stack.field(0, affine=False)
    assert not close(whole.attention(0.0).outputs(u), bare.attention(0.0).outputs(u), eps=1e3)
    assert bare.drift.constant is None and bare.drift.linear is None and bare.heads.query_bias is None
    rest = whole.push(0.0, u) - jnp.sum(whole.attention(0.0).outputs(u), axis=0)
    assert close(rest, whole.drift.linear * u + whole.drift.constant)


# ---- clocks ----


def test_the_residual_stream_carries_the_papers_clock(tmp_path):
    stack = open_tiny("gpt2", tmp_path, layer_norm_epsilon=0)
    r = jnp.asarray(stack.embed(IDS))
    r = r - r.mean(axis=1, keepdims=True)
    length = jnp.linalg.norm(r, axis=1, keepdims=True)
    u = r / length
    stream = stack.field(1)(0.0, r)
    turning = (stream - jnp.sum(stream * u, axis=1, keepdims=True) * u) / length  # du/dt of r/|r|
    assert close(turning, stack.field(1, clock="residual-norm")(0.0, u) / length)


def test_layers_last_as_long_as_the_residual_is_short(tmp_path):
    stack = open_tiny("gpt2", tmp_path)
    passes = stack.layers(stack.embed(IDS))
    field = stack.field(clock="residual-norm", radius=passes.radius)
    assert close(jnp.diff(field.switches), np.mean(1 / passes.radius[:-1], axis=1))
    assert field.on_sphere and not stack.field().on_sphere
    with pytest.raises(ValueError, match="needs `radius`"):
        stack.field(clock="residual-norm")
    with pytest.raises(ValueError, match="After-norm"):
        open_tiny("bert", tmp_path).field(clock="residual-norm")


def test_rotary_positions_are_refused_unless_ignored(tmp_path):
    stack = open_tiny("llama", tmp_path)
    with pytest.raises(ValueError, match="Rotary positions are not folded"):
        stack.field()
    x = jnp.asarray(stack.embed(IDS))
    assert np.array_equal(stack.field(rotary="ignore")(0.0, x), unrotated(stack).field()(0.0, x))


def test_fields_of_several_layers_have_no_scaled_clock(tmp_path):
    stack = open_tiny("bert", tmp_path)
    x = sphere_tokens(5, 16)
    with pytest.raises(ValueError, match="physical clock only"):
        stack.field().scaled(x)
    assert np.array_equal(stack.field(1).scaled(x)[0], stack.field(1)(0.0, x))


def test_requests_that_make_no_field_are_refused(tmp_path):
    stack = open_tiny("bert", tmp_path)
    with pytest.raises(ValueError, match=r"must lie in 0\.\.1"):
        stack.field(2)
    with pytest.raises(ValueError, match="at least one"):
        stack.field([])
    with pytest.raises(ValueError, match="feed-forward block in every layer"):
        shared().field(feed_forward="split")
    with pytest.raises(ValueError, match=r"shape \(n, 16\)"):
        stack.layers(np.zeros((3, 5)))


# ---- layers against flow ----


@pytest.mark.slow
def test_the_gap_between_layer_and_flow_is_of_second_order_in_the_step():
    gaps = []
    for size in (0.1, 0.05):
        q, key, v, o = baseline(2, 3, 8)
        stack = pretrained.from_arrays(
            *(np.stack([a, a]) for a in (0.3 * q, 0.3 * key, v, size * o)), order="post", centred=False
        )
        gaps.append(stack.discretisation_gap(np.asarray(sphere_tokens(6, 8)), feed_forward=False, rtol=1e-8))
    assert np.allclose(gaps[0].turn / gaps[1].turn, 2, rtol=0.15)
    assert np.allclose(gaps[0].error / gaps[1].error, 4, rtol=0.3)
    assert np.allclose(gaps[0].ratio / gaps[1].ratio, 2, rtol=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_the_gap_is_that_of_finely_stepped_blocks(tmp_path, kind):
    stack = open_tiny(kind, tmp_path)
    x0 = stack.embed(IDS)
    gap, passes = stack.discretisation_gap(x0, rtol=1e-8), stack.layers(x0)
    field = stack.field(1, feed_forward="split")
    state = jnp.asarray(passes.residual[1] if field.residual else passes.tokens[1])

    @jax.jit
    def midpoint(state, t):
        half = state + field(t, state) / 4000
        return state + field(t, half) / 2000

    for step in range(2000):
        state = midpoint(state, step / 2000)
    u = np.asarray(field.directions(state))
    u = u / np.linalg.norm(u, axis=1, keepdims=True)
    angle = np.degrees(np.arccos(np.sum(u * passes.tokens[2], axis=1))).mean()
    assert abs(gap.error[1] - angle) < 1e-3 * angle
    assert gap.error.shape == gap.turn.shape == (len(stack),)


# ---- the end ----


def rotating(seed, real=False):
    """A shared layer whose summed value matrix has a leading complex pair (or a real eigenvalue) in a random plane."""
    d = 6
    rng = np.random.default_rng(seed)
    frame = np.linalg.qr(rng.standard_normal((d, d)))[0]
    block = np.diag([1.0, 1.0, 0.3, 0.1, -0.2, -0.4])
    block[:2, :2] = [[1.0, 0.0], [0.0, 0.5]] if real else [[1.0, -1.5], [1.5, 1.0]]
    v = frame @ block @ frame.T / np.sqrt(d)
    q = 0.4 * rng.standard_normal((1, 1, d, d))
    return pretrained.from_arrays(q, q, v[None, None], np.eye(d)[None, None], centred=False), frame


@pytest.mark.slow
def test_the_end_of_a_shared_layer_is_a_turning_cluster_in_the_plane_of_the_leading_pair():
    stack, frame = rotating(0)
    field = stack.field(clock="residual-norm", affine=False)
    space = pretrained.terminal_space(field)
    assert np.allclose(space.basis @ space.basis.T, frame[:, :2] @ frame[:, :2].T)
    assert abs(space.turning - 1.5) < 1e-12
    x = jnp.abs(sphere_tokens(8, 6)) @ jnp.asarray(frame.T)  # in one hemisphere
    start = pretrained.terminal_phase(field, x / jnp.linalg.norm(x, axis=1, keepdims=True))
    run = solve(field, x, jnp.linspace(0.0, 40.0, 161), save_tokens=True, normalize=True)
    end = pretrained.terminal_phase(field, run.final)
    assert start.alignment < 0.9 and start.mean_cosine < 0.9
    assert end.alignment > 1 - 1e-8 and end.mean_cosine > 1 - 1e-8
    assert abs(end.speed - 1.5) < 1e-6  # no stationary state
    path = np.asarray(run.values["tokens"])[-41:, 0] @ frame[:, :2]
    turned = np.unwrap(np.arctan2(path[:, 1], path[:, 0]))
    assert abs((turned[-1] - turned[0]) / 10 - 1.5) < 1e-3
    assert float(ob.overlap(field, run.final, jnp.asarray(space.basis))) > 1 - 1e-8


@pytest.mark.slow
def test_a_real_leading_eigenvalue_ends_at_rest():
    stack, frame = rotating(1, real=True)
    field = stack.field(clock="residual-norm", affine=False)
    x = jnp.abs(sphere_tokens(8, 6)) @ jnp.asarray(frame.T)
    run = solve(field, x, jnp.array([0.0, 60.0]), normalize=True)
    end = pretrained.terminal_phase(field, run.final)
    assert end.space.basis.shape == (6, 1) and end.space.turning == 0
    assert end.alignment > 1 - 1e-6 and end.speed < 1e-4


def test_the_direction_that_a_layer_norm_removes_is_no_terminal_space():
    d = 5
    q, key, *_ = baseline(1, d, d)
    stack = pretrained.from_arrays(q[None], key[None], -np.eye(d)[None, None], np.eye(d)[None, None], order="post")
    space = pretrained.terminal_space(stack.field(affine=False))
    assert space.eigenvalues[0].real < 0 and abs(space.basis.sum()) < 1e-12


def test_the_terminal_phase_is_asked_of_heads_alone(tmp_path):
    stack = open_tiny("albert", tmp_path)
    x = sphere_tokens(4, 16)
    with pytest.raises(ValueError, match="heads alone"):
        pretrained.terminal_phase(stack.field(), x)
    with pytest.raises(ValueError, match="no one terminal space"):
        pretrained.terminal_space(open_tiny("bert", tmp_path).field(affine=False))
    assert pretrained.terminal_phase(stack.field(affine=False), x).alignment < 1


def test_a_shared_stack_has_an_autonomous_flow(tmp_path):
    stack = open_tiny("albert", tmp_path)
    u = jnp.asarray(stack.layers(stack.embed(IDS)).tokens[1])
    field = stack.field()
    assert field.count == 1 and field.jumps.size == 0
    assert np.array_equal(field(0.0, u), field(123.4, u))
    split = stack.field(feed_forward="split")
    assert np.array_equal(split.jumps, [0.5, 1, 1.5, 2, 2.5]) and np.array_equal(split(0.1, u), split(2.1, u))
    assert isinstance(split.controller(), dfx.ClipStepSizeController)
