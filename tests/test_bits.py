"""What is promised to have the same bits has them: another process, another order of points; the rest agrees to rounding."""

import hashlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from attnflow import AttentionField, ScalarHeads, Softmax, observe, solve, sphere
from attnflow.points import grid
from attnflow.sweep import sweep

FLOW = """
import jax
jax.config.update("jax_enable_x64", True)
import hashlib
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from attnflow import AttentionField, ScalarHeads, Softmax, solve, sphere
x0 = sphere.uniform(jr.key(0), 40, 3)
run = solve(AttentionField(ScalarHeads([1.0, 0.5]), Softmax(4.0)), x0, jnp.linspace(0.0, 5.0, 3), save_tokens=True)
print(hashlib.sha256(np.asarray(run.values["tokens"]).tobytes()).hexdigest())
"""


def test_another_process_has_the_same_bits():
    command = [sys.executable, "-W", "ignore", "-c", FLOW]
    first, second = (subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2))
    assert first == second and len(first.strip()) == 64


def test_the_same_call_has_the_same_bits():
    x0 = sphere.uniform(jr.key(0), 40, 3)

    def digest():
        field = AttentionField(ScalarHeads([1.0, 0.5]), Softmax(4.0))
        final = solve(field, x0, jnp.linspace(0.0, 5.0, 3)).final
        return hashlib.sha256(np.asarray(final).tobytes()).hexdigest()

    before = digest()
    jax.clear_caches()
    assert digest() == before


def flow(beta, key, ts):
    field = AttentionField(ScalarHeads([1.0]), Softmax(beta))
    return solve(field, sphere.uniform(key, 8, 3), ts, observe={"c": observe.mean_cosine}, throw=False)


def test_the_order_of_points_changes_no_bit_and_the_group_only_roundings():
    betas, keys, one = np.array([0.5, 1.0, 2.0, 4.0]), jr.split(jr.key(0), 3), jax.local_devices()[:1]

    def cosines(order, group):
        points = grid(beta=betas[order], key=keys)
        out = sweep(flow, points, shared=(jnp.linspace(0.0, 3.0, 4),), chunk=12, group=group, devices=one)
        return out.c.values[np.argsort(order)]

    straight, turned = np.arange(4), np.array([2, 0, 3, 1])
    plain = cosines(straight, 4)
    assert cosines(turned, 4).tobytes() == plain.tobytes()
    assert np.abs(cosines(straight, 12) - plain).max() < 1e-13
