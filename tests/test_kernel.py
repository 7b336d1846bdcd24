"""The GPU kernel, in Pallas' interpret mode, against plain numpy and the other reductions; and its lowering for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_reduce import error, numpy_sums, problem

from attnflow import AttentionField, ScalarHeads, Softmax
from attnflow.exponential import excess
from attnflow.kernel import Kernel
from attnflow.reduce import Blocked, Dense

SMALL = Kernel(16, 16)  # 37 tokens: three blocks, the last of them partly filled


def sums(method, q, keys, values, w, causal=False):
    """Everything a reduction does, with the elementwise functions of the attentions that use a sum."""
    shift = jnp.full(q.shape[:2], 0.5, q.dtype)
    return [
        *method.log_mean(q, keys, values, w, causal=causal),
        method.sum(jnp.tanh, q, keys, values, w, shift=shift, causal=causal),
        method.maximum(q, keys, w, causal=causal),
        method.sum(jax.nn.relu, q, keys, values, w, causal=causal),
    ]


def loss(method, causal, arrays):
    """A scalar that feels every entry of log_mean and sum."""
    log_mass, mean, bent, top, _ = sums(method, *arrays, causal)
    return sum(jnp.sum(jnp.sin(a)) for a in (log_mass, mean, bent, top))


def relu_sum(q, keys, values, w, causal):
    q, keys, values, w = (np.asarray(a, np.float64) for a in (q, keys, values, w))
    s = np.maximum(q @ np.swapaxes(keys, -1, -2), 0) * w
    return (np.tril(s) if causal else s) @ values


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_sums_are_those_of_numpy(per_head, causal, dtype):
    """Weights, two of them 0, an odd number of tokens, keys shared or not, heads that straddle a block."""
    arrays = problem(dtype, per_head=per_head)
    got = jax.jit(lambda *a: sums(SMALL, *a, causal))(*arrays)
    expected = [*numpy_sums(*arrays, causal), relu_sum(*arrays, causal)]
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        assert error(a, b) < 20 * np.finfo(dtype).eps


@pytest.mark.parametrize("n,m", [(1, 9), (150, 70)])
def test_any_number_of_queries_and_keys_will_do(n, m, dtype):
    arrays = problem(dtype, n=n, m=m, seed=1)
    got = jax.jit(lambda *a: sums(Kernel(), *a))(*arrays)
    for a, b in zip(got, numpy_sums(*arrays), strict=False):
        assert error(a, b) < 20 * np.finfo(dtype).eps


@pytest.mark.parametrize("k,e", [(1, 1), (25, 3), (5, 30)])
def test_wide_and_narrow_tokens_agree_with_dense(k, e, dtype):
    """Both sides of the switch from columns to products, for the scores and for the values."""
    rng = np.random.default_rng(2)
    q, keys, values = (rng.standard_normal(s) / np.sqrt(s[-1]) for s in ((2, 21, k), (35, k), (35, e)))
    arrays = [jnp.asarray(a, dtype) for a in (q, keys, values, rng.uniform(0.5, 1.5, 35) / 35)]
    run = jax.jit(lambda method, *a: sums(method, *a), static_argnums=0)
    for a, b in zip(run(SMALL, *arrays), run(Dense(), *arrays), strict=True):
        assert error(a, b) < 20 * np.finfo(dtype).eps


@pytest.mark.parametrize("beta,causal", [(60.0, False), (1e4, True)])
def test_sums_do_not_overflow_at_any_temperature(beta, causal, dtype):
    """Scores reach 1e5, so their rounding is what is left."""
    arrays = problem(dtype, beta=beta)
    got = jax.jit(lambda *a: SMALL.log_mean(*a, causal=causal))(*arrays)
    expected = numpy_sums(*arrays, causal)[:2]
    rounding = 4 * np.finfo(dtype).eps * np.max(np.abs(expected[0]))
    for a, b in zip(got, expected, strict=True):
        assert error(a, b) < rounding


def test_keys_of_weight_zero_change_nothing_even_where_they_dominate(dtype):
    """A whole block of keys that do not count comes first, with scores 1e4 above the rest; causal rows lose their keys too."""
    q, keys, values, w = problem(dtype, seed=6)
    dead = np.arange(len(w)) < 16
    keys, w = jnp.where(dead[:, None], jnp.asarray(1e4, dtype), keys), jnp.where(dead, 0, w)
    got = jax.jit(SMALL.log_mean)(q, keys, values, w)
    for a, b in zip(got, numpy_sums(q, keys[16:], values[16:], w[16:]), strict=False):
        assert error(a, b) < 20 * np.finfo(dtype).eps
    slope = jax.jit(jax.grad(lambda k: jnp.sum(SMALL.log_mean(q, k, values, w)[1])))(keys)
    assert np.all(np.isfinite(slope)) and np.all(slope[:16] == 0)
    log_mass, _ = jax.jit(lambda *a: SMALL.log_mean(*a, causal=True))(q, keys, values, w)
    assert np.all(log_mass[:, :16] == -np.inf) and np.all(np.isfinite(log_mass[:, 16:]))


@pytest.mark.parametrize("per_head,causal,dtype", [(False, False, np.float32), (True, True, np.float64)])
def test_derivatives_are_those_of_dense(per_head, causal, dtype):
    """Forward mode and reverse in every argument, the weight of 0 included, and both through jit."""
    arrays = tuple(problem(dtype, per_head=per_head, seed=3))
    rng = np.random.default_rng(4)
    directions = tuple(jnp.asarray(rng.standard_normal(a.shape), dtype) for a in arrays)
    push = jax.jit(lambda method, a, t: jax.jvp(lambda b: loss(method, causal, b), (a,), (t,)), static_argnums=0)
    pull = jax.jit(lambda method, a: jax.grad(lambda b: loss(method, causal, b))(a), static_argnums=0)
    room = 500 * np.finfo(dtype).eps
    for a, b in zip(push(SMALL, arrays, directions), push(Dense(), arrays, directions), strict=True):
        assert abs(a - b) < room * max(1, abs(b))
    slopes, expected = pull(SMALL, arrays), pull(Dense(), arrays)
    for a, b in zip(slopes, expected, strict=True):
        assert error(a, b) < room * max(1, np.max(np.abs(b)))
    assert abs(slopes[3][3]) > 0.1  # the key of weight 0


def test_second_derivatives_are_those_of_dense():
    q, keys, values, w = problem(np.float64, seed=3)

    def hessian_vector(method):
        value = lambda a: jnp.sum(jnp.sin(method.log_mean(a, keys, values, w)[1]))  # noqa: E731
        return jax.jit(lambda a: jax.jvp(jax.grad(value), (a,), (jnp.ones_like(a),))[1])(q)

    assert error(hessian_vector(SMALL), hessian_vector(Dense())) < 1e-13


def test_batches_are_their_members():
    """vmap over everything, over the queries alone twice, and of gradients."""
    dtype = np.float32
    one, two = problem(dtype, seed=4), problem(dtype, seed=5, beta=300.0)
    both = [jnp.stack(pair) for pair in zip(one, two, strict=True)]
    run = lambda *a: SMALL.log_mean(*a)  # noqa: E731
    batched = jax.jit(jax.vmap(run))(*both)
    twice = jax.jit(jax.vmap(jax.vmap(lambda q: run(q, *one[1:]))))(jnp.stack([both[0]] * 3))
    slope = jax.grad(lambda q, keys: jnp.sum(jnp.sin(run(q, keys, *one[2:])[0])), argnums=(0, 1))
    slopes = jax.jit(jax.vmap(slope))(both[0], both[1])
    eps = 40 * np.finfo(dtype).eps
    for lane, arrays in enumerate((one, two)):
        scale = max(1, np.max(np.abs(numpy_sums(*arrays)[0])))
        for a, b in zip(batched, numpy_sums(*arrays), strict=False):
            assert error(a[lane], b) < eps * scale
        for a, b in zip(twice, numpy_sums(arrays[0], *one[1:]), strict=False):
            assert error(a[2, lane], b) < eps * scale
        for a, b in zip(slopes, jax.jit(slope)(*arrays[:2]), strict=True):
            assert error(a[lane], b) < eps * scale * max(1, np.max(np.abs(b)))


def test_an_elementwise_function_that_asks_for_the_platform_is_summed_by_blocks():
    """The relative entropy uses this package's exponential, which a kernel compiled for one platform cannot hold."""
    q, keys, values, w = problem(np.float64, seed=9)
    run = jax.jit(lambda method: method.sum(excess, q, keys, values, w), static_argnums=0)
    assert np.array_equal(run(Kernel(interpret=False)), run(Blocked()))


def test_a_field_moves_the_same_tokens_with_the_kernel(dtype):
    x = np.random.default_rng(7).standard_normal((40, 3))
    x = jnp.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), dtype)
    heads = ScalarHeads([4.0, 0.5])
    velocity = lambda method: AttentionField(heads, Softmax(1.0), reduction=method)(0.0, x)  # noqa: E731
    assert error(velocity(Kernel()), velocity(Dense())) < 20 * np.finfo(dtype).eps


@pytest.mark.parametrize("size", [8, 24, 0])
def test_blocks_are_powers_of_two(size):
    with pytest.raises(ValueError, match=f"`key_block` must be a power of two of at least 16, got {size}"):
        Kernel(key_block=size)


@pytest.mark.parametrize("width,causal", [(3, True), (64, False)])
def test_the_kernel_lowers_for_cuda_and_not_to_tf32(causal, width, dtype):
    """Without a device: every operation has its Triton form, each sum is one custom call, each product full precision."""
    q, keys, w = (jax.ShapeDtypeStruct(s, dtype) for s in ((2, 1000, width), (1000, width), (1000,)))
    run = lambda q, keys, w: sums(Kernel(interpret=False), q, keys, keys, w, causal)  # noqa: E731
    traced = jax.jit(run).trace(q, keys, w)
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("xla.gpu.triton") == 4
    program = str(traced.jaxpr)
    products = program.count("dot_general[")
    assert products == (7 if width == 64 else 0)  # scores and values of three sums, scores of the maximum
    assert program.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products
    slope = jax.grad(lambda *a: jnp.sum(run(*a)[1]), argnums=(0, 1, 2))
    assert "xla.gpu.triton" in jax.jit(slope).trace(q, keys, w).lower(lowering_platforms=("cuda",)).as_text()
