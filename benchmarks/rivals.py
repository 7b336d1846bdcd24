"""One evaluation and one gradient of softmax attention, as this package does it and as its user would write it otherwise.

Every evaluation is a call of no arguments that returns the weighted means of the keys (n, d) for queries beta x; every
gradient returns the derivative in x of the sum of `ct` times them. Libraries that are not there give a `NotRun`.
"""

import importlib

import jax
import jax.numpy as jnp
import numpy as np

from attnflow.reduce import Blocked

from . import floor
from .measure import NotRun, cores

# The arithmetic of each: `x` tokens (H, n, d) as queries after scaling, keys and values shared.


def evaluations(x: np.ndarray, beta: float, heads: int = 1, slow: bool = True) -> dict:
    """Contestants for `heads` heads that share their keys: queries (H n, d) against x."""
    q = np.concatenate([(beta * (1 - 0.1 * h)) * x for h in range(heads)]).astype(x.dtype)
    calls = {"floor": floor.evaluation(q, x), "attnflow": _attnflow(q, x, heads), "torch sdpa": _torch_sdpa(q, x)}
    calls["jax.nn.dot_product_attention"] = _jax_nn(q, x)
    if slow:
        calls["jax, naive"] = _jax_naive(q, x)
        calls["torch, explicit softmax"] = _torch_explicit(q, x)
        calls["numpy"] = lambda: _numpy(q, x)
    calls["keops"] = _keops(q, x)
    return calls


def gradients(x: np.ndarray, beta: float, ct: np.ndarray, slow: bool = True) -> dict:
    calls = {
        "attnflow forward": _attnflow((beta * x).astype(x.dtype), x, 1),
        "attnflow": _attnflow_gradient(x, beta, ct),
        "torch sdpa": _torch_gradient(x, beta, ct, explicit=False),
    }
    if slow:
        calls["jax, naive"] = _jax_naive_gradient(x, beta, ct)
        calls["torch, explicit softmax"] = _torch_gradient(x, beta, ct, explicit=True)
    return calls


def exact(x: np.ndarray, q: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Rows of the answer in float64."""
    s = q[rows].astype(np.float64) @ x.astype(np.float64).T
    p = np.exp(s - s.max(1, keepdims=True))
    return p @ x.astype(np.float64) / p.sum(1, keepdims=True)


def _attnflow(q, x, heads):
    run = jax.jit(lambda q, x, w: Blocked().log_mean(q, x, x, w)[1])
    arrays = jnp.asarray(q.reshape(heads, -1, x.shape[1])), jnp.asarray(x), jnp.full(len(x), 1 / len(x), x.dtype)
    return lambda: np.asarray(run(*arrays)).reshape(-1, x.shape[1])


def _attnflow_gradient(x, beta, ct):
    def value(x, w, ct):
        return jnp.sum(ct * Blocked().log_mean((jnp.asarray(beta, x.dtype) * x)[None], x, x, w)[1][0])

    run, arrays = jax.jit(jax.grad(value)), (jnp.asarray(x), jnp.full(len(x), 1 / len(x), x.dtype), jnp.asarray(ct))
    return lambda: np.asarray(run(*arrays))


def _naive(q, x):
    s = q @ x.T
    p = jnp.exp(s - jnp.max(s, axis=1, keepdims=True))
    return (p @ x) / jnp.sum(p, axis=1, keepdims=True)


def _jax_naive(q, x):
    run, arrays = jax.jit(_naive), (jnp.asarray(q), jnp.asarray(x))
    return lambda: np.asarray(run(*arrays))


def _jax_naive_gradient(x, beta, ct):
    run = jax.jit(jax.grad(lambda x, ct: jnp.sum(ct * _naive(jnp.asarray(beta, x.dtype) * x, x))))
    arrays = jnp.asarray(x), jnp.asarray(ct)
    return lambda: np.asarray(run(*arrays))


def _jax_nn(q, x):
    run = jax.jit(
        lambda q, x: jax.nn.dot_product_attention(q[None, :, None], x[None, :, None], x[None, :, None], scale=1.0)
    )
    arrays = jnp.asarray(q), jnp.asarray(x)
    return lambda: np.asarray(run(*arrays))[0, :, 0]


def _numpy(q, x):
    """In the style of the published scripts: all scores, no maximum subtracted."""
    p = np.exp(q @ x.T)
    return (p @ x) / p.sum(1, keepdims=True)


def module(name: str):
    """A library that need not be there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return NotRun(f"{name} is not installed")


def torch_here():
    torch = module("torch")
    if not isinstance(torch, NotRun):
        torch.set_num_threads(cores())
    return torch


def sdpa(torch, q, x):
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q[None, None], x[None, None], x[None, None], scale=1.0)[0, 0]


def _torch_sdpa(q, x):
    torch = torch_here()
    if isinstance(torch, NotRun):
        return torch
    q, x = torch.from_numpy(q), torch.from_numpy(x)

    def call():
        with torch.no_grad():
            return sdpa(torch, q, x).numpy()

    return call


def _torch_explicit(q, x):
    torch = torch_here()
    if isinstance(torch, NotRun):
        return torch
    q, x = torch.from_numpy(q), torch.from_numpy(x)

    def call():
        with torch.no_grad():
            return (torch.softmax(q @ x.T, dim=1) @ x).numpy()

    return call


def _torch_gradient(x, beta, ct, explicit):
    torch = torch_here()
    if isinstance(torch, NotRun):
        return torch
    leaf, ct = torch.from_numpy(x.copy()).requires_grad_(True), torch.from_numpy(ct)

    def call():
        leaf.grad = None
        q = beta * leaf
        out = torch.softmax(q @ leaf.T, dim=1) @ leaf if explicit else sdpa(torch, q, leaf)
        (ct * out).sum().backward()
        return leaf.grad.numpy()

    return call


def _keops(q, x):
    torch, keops = torch_here(), module("pykeops.torch")
    if isinstance(keops, NotRun) or isinstance(torch, NotRun):
        return keops if isinstance(keops, NotRun) else torch
    i, j = keops.LazyTensor(torch.from_numpy(q)[:, None]), keops.LazyTensor(torch.from_numpy(x)[None])
    values = keops.LazyTensor(torch.from_numpy(x)[None])
    return lambda: (i | j).sumsoftmaxweight(values, axis=1).numpy()
