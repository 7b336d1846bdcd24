"""Strict settings for every test: x64, no silent promotion, four CPU devices, warnings are errors."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
os.environ.setdefault("MPLBACKEND", "Agg")

import jax
import jax.random as jr
import numpy as np
import pytest

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture(autouse=True, scope="module")
def forget_compiled_programs():
    """A thousand tests compile gigabytes of programs: each file leaves none behind."""
    yield
    jax.clear_caches()


@pytest.fixture
def key():
    return jr.key(20260)


@pytest.fixture(params=[np.float32, np.float64], ids=["f32", "f64"])
def dtype(request):
    return request.param
