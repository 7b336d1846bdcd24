"""Spectra, angles and token measures of heads against dense formulas, the observables of the flow, and real cuts."""

import json
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from exact import relative_error
from rich.console import Console
from safetensors.numpy import load_file

import attnflow.observe as ob
from attnflow import pretrained
from attnflow.attention import Softmax
from attnflow.field import AttentionField
from attnflow.heads import FactoredHeads
from attnflow.pretrained.measures import depth_of, measures
from attnflow.pretrained.spectra import baseline, eigenvalues, overlaps, own_angles, principal_angles, spectra

CUTS = Path(__file__).parent / "fixtures"


def factors(H=3, k=4, d=9, seed=0):
    return baseline(H, k, d, seed=seed)


def cut(name):
    a = {key: value.astype(np.float64) for key, value in load_file(CUTS / name).items()}
    order = "post" if name.startswith("minilm") else "pre"
    parts = [a.pop(part) for part in ("query", "key", "value", "output")]
    return pretrained.from_arrays(*parts, order=order, causal=order == "pre", **a)


# ---- weights ----


@pytest.mark.parametrize(("k", "d"), [(4, 9), (5, 5), (1, 6), (6, 8)])
def test_spectra_are_those_of_the_dense_matrices(k, d):
    q, key, v, o = factors(k=k, d=d, seed=k)
    found = spectra(q, key, v, o)
    for h in range(3):
        m, n = q[h].T @ key[h], o[h] @ v[h]
        product = n @ m.T
        mu = np.linalg.eigvals(product)
        mu = mu[np.argsort(-np.abs(mu))][:k]  # the others are 0
        leading = np.sort(mu.real)[::-1]
        size, sym = np.linalg.norm(m), np.linalg.eigvalsh((m + m.T) / 2)
        dense = {
            "symmetry_defect": np.linalg.norm(m - m.T) / size,
            "alignment": np.sum(m * n) / (size * np.linalg.norm(n)),
            "product_defect": np.linalg.norm(product - product.T) / np.linalg.norm(product),
            "complex_share": np.mean(np.abs(mu.imag) > 1e-9 * np.abs(mu).max()),
            "negative_share": np.mean(mu.real < 0),
            "gap": (leading[0] - leading[1]) / np.abs(mu).max() if k > 1 else 1.0,
            "positive_share": sym[sym > 0].sum() / np.abs(sym).sum(),
            "scalar_defect": np.linalg.norm(m - np.trace(m) / d * np.eye(d)) / size,
            "stable_rank": (size / np.linalg.norm(m, 2)) ** 2,
            "beta_op": np.linalg.norm(m, 2),
            "beta_frobenius": size / np.sqrt(k),
            "score_rms": size / d,
            "trace": np.trace(m) / d,
            "copying": np.trace(n) / (np.linalg.norm(n) * np.sqrt(k)),
        }
        assert set(dense) == set(found._fields)
        for name, value in dense.items():
            assert abs(getattr(found, name)[h] - value) < 1e-10 * max(1, abs(value)), name


def test_eigenvalues_of_a_product_are_found_from_its_core():
    q, key, v, o = factors()
    for h, mu in enumerate(eigenvalues(q, key, v, o)):
        dense = np.linalg.eigvals(o[h] @ v[h] @ (q[h].T @ key[h]).T)
        for value in mu:
            assert np.abs(dense - value).min() < 1e-10 * np.abs(dense).max()


def test_angles_are_those_between_the_dense_projectors():
    q, key, _, _ = factors(H=4, k=3, d=11)
    projectors = [np.linalg.pinv(a) @ a for a in q]
    found = principal_angles(q)
    for pair, (a, b) in enumerate(zip(*np.triu_indices(4, 1), strict=True)):
        cos = np.sqrt(np.sort(np.linalg.eigvalsh(projectors[a] @ projectors[b] @ projectors[a]))[-3:])
        assert abs(np.cos(np.radians(found.smallest[pair])) - cos[-1]) < 1e-12
        assert abs(found.median[pair] - np.degrees(np.arccos(cos[1]))) < 1e-6
        assert abs(np.cos(np.radians(found.rms[pair])) ** 2 - np.mean(cos**2)) < 1e-12
    own = own_angles(q, key)
    other = np.linalg.pinv(key[1]) @ key[1]
    assert abs(np.cos(np.radians(own.rms[1])) ** 2 - np.trace(projectors[1] @ other) / 3) < 1e-12


def test_overlaps_are_operator_norms_of_dense_products():
    q, key, _, _ = factors(H=3)
    m = [a.T @ b for a, b in zip(q, key, strict=True)]
    dense = [[np.linalg.norm(a @ b, 2) / np.linalg.norm(a, 2) / np.linalg.norm(b, 2) for b in m] for a in m]
    assert np.abs(overlaps(q, key) - dense).max() < 1e-12


def test_orthogonal_heads_have_right_angles_and_no_overlap():
    frame = np.linalg.qr(np.random.default_rng(0).standard_normal((12, 12)))[0].reshape(3, 4, 12)
    angles = principal_angles(frame)
    assert np.allclose(angles, 90)
    assert overlaps(frame, frame)[~np.eye(3, dtype=bool)].max() < 1e-14


def test_the_typical_angle_of_random_heads_is_a_number_of_heads_and_not_of_training():
    for heads, degrees in ((8, 69.3), (12, 73.2)):
        q, *_ = baseline(heads, 32, 32 * heads)
        assert abs(principal_angles(q).rms.mean() - degrees) < 0.3
        assert abs(np.degrees(np.arccos(heads**-0.5)) - degrees) < 0.06


def test_no_matrix_of_d_by_d_is_formed():
    d = 4096
    q, key, v, o = factors(H=2, k=4, d=d)
    stack = pretrained.from_arrays(q[None], key[None], v[None], o[None])
    tracemalloc.start()
    pretrained.diagnose(stack)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < d * d * 8 / 8


def test_a_head_of_zeros_has_undefined_defects_and_raises_nothing():
    q, key, v, o = factors()
    found = spectra(0 * q, key, v, o)
    assert np.isnan(found.symmetry_defect).all() and (found.beta_op == 0).all()


# ---- tokens ----


def flat_stack(causal=False, seed=0, H=3, k=4, d=9):
    """RMS norm without gain, no biases: exactly the papers' heads."""
    q, key, v, o = factors(H, k, d, seed)
    q, key = 0.3 * q, 0.3 * key
    stack = pretrained.from_arrays(q[None], key[None], v[None], o[None], centred=False, causal=causal)
    root = d**0.5
    heads = FactoredHeads(root * k**-0.25 * q, root * k**-0.25 * key, root * v, o)
    return stack, AttentionField(heads, Softmax(1.0), causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_measures_are_the_observables_of_the_flow(causal):
    stack, field = flat_stack(causal)
    r = 2.5 * np.random.default_rng(1).standard_normal((7, 9))
    x = jnp.asarray(r / np.linalg.norm(r, axis=1, keepdims=True))
    layer = stack.layer(0)
    found = measures(layer.attention, layer.attention_norm, r, centred=False, post=False)
    condition8, sharp, exact = ob.dominance_margins(field, x)
    f, a = np.asarray(field.outputs(x)), np.asarray(ob.radial_shadow(field, x))
    tangent = f - a[..., None] * np.asarray(x)
    assert relative_error(found.shadow, np.mean(np.abs(a) / np.linalg.norm(f, axis=-1), axis=1)) < 1e-12
    assert np.array_equal(found.condition8, np.mean(np.asarray(condition8) >= 0, axis=1))
    assert np.array_equal(found.sharp, np.mean(np.asarray(sharp) >= 0, axis=1))
    scale = np.linalg.norm(tangent, axis=(1, 2)) * np.linalg.norm(tangent.sum(0))
    assert relative_error(found.exact, 7 * np.asarray(exact) / scale) < 1e-10
    if causal:
        scores = np.einsum("nd,hde,me->hnm", x, field.heads.score, x)
        rows = [[np.exp(s[i, : i + 1]) / np.exp(s[i, : i + 1]).sum() for i in range(1, 7)] for s in scores]
        shares = [np.mean([-(p @ np.log(p)) / np.log(len(p)) for p in row]) for row in rows]
        assert relative_error(found.entropy, shares) < 1e-10
    else:
        assert relative_error(found.entropy, np.asarray(ob.entropy(field, x)) / np.log(7)) < 1e-10
        rates = np.asarray(ob.head_energy_rates(field, x)) / np.asarray(ob.head_energies(field, x))
        assert relative_error(found.energy_rate, rates) < 1e-9


def test_a_scalar_head_has_its_strength_as_every_beta():
    d, lam = 6, 1.7
    eye = np.eye(d)[None, None]
    stack = pretrained.from_arrays(lam * eye, eye, eye, eye, centred=False, scale=1 / d)
    layer = stack.layer(0)
    found = measures(
        layer.attention,
        layer.attention_norm,
        np.random.default_rng(0).standard_normal((8, d)),
        centred=False,
        post=False,
    )
    assert relative_error([found.beta_spread[0], found.beta_regression[0], found.r_squared[0]], [lam, lam, 1]) < 1e-12
    stranger, _ = flat_stack()
    layer = stranger.layer(0)
    found = measures(
        layer.attention,
        layer.attention_norm,
        np.random.default_rng(0).standard_normal((8, 9)),
        centred=False,
        post=False,
    )
    assert found.r_squared.max() < 0.7


def test_a_shared_direction_is_clustering_until_the_mean_is_taken_off():
    rng = np.random.default_rng(0)
    u = rng.standard_normal((200, 50)) + 3 * np.eye(50)[0] * np.sqrt(50)
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    depth = depth_of(u, np.ones(200))
    assert depth.mean_cosine > 0.85 and abs(depth.centred_cosine + 1 / 199) < 0.01


def test_a_collapsed_state_is_measured_without_a_warning():
    depth = depth_of(np.tile(np.eye(4)[:1], (3, 1)), np.ones(3))
    assert depth.mean_cosine == 1 and depth.centred_cosine == 0


# ---- the table ----


def test_heads_that_meet_a_hypothesis_are_told_from_those_that_do_not():
    rng = np.random.default_rng(0)
    p = rng.standard_normal((1, 1, 5, 5))
    q = np.swapaxes(p, 2, 3)
    aligned = pretrained.from_arrays(p, p, p, q, centred=False)  # M = V = p^T p, of full rank
    x = rng.standard_normal((6, 5))
    holds = {v.hypothesis: v.holds for v in pretrained.diagnose(aligned, x).verdicts}
    for name in ("M symmetric", "V = M", "V B^T symmetric", "real leading", "B invertible", "exact margin"):
        assert [ok for text, ok in holds.items() if text.startswith(name)] == [True], name
    a, b, c, e = rng.standard_normal((4, 1, 1, 5, 5))
    holds = {
        v.hypothesis: v.holds for v in pretrained.diagnose(pretrained.from_arrays(a, b, c, e, centred=False)).verdicts
    }
    for name in ("M symmetric", "V = M", "V B^T symmetric"):
        assert [ok for text, ok in holds.items() if text.startswith(name)] == [False], name
    low = pretrained.from_arrays(p[:, :, :3], p[:, :, :3], p[:, :, :3], q[..., :3], centred=False)
    assert not next(v for v in pretrained.diagnose(low).verdicts if v.hypothesis.startswith("B invertible")).holds


def test_orthogonal_heads_meet_theorem_39():
    frame = np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))[0].reshape(1, 3, 2, 6)
    stack = pretrained.from_arrays(frame, frame, frame, frame.swapaxes(2, 3), centred=False)
    verdict = next(v for v in pretrained.diagnose(stack).verdicts if "Theorem 39" in v.theorem)
    assert verdict.holds and "holds" in str(verdict) and verdict.random > 0.5


def test_the_table_is_written_and_read_back(tmp_path):
    stack, _ = flat_stack()
    x = np.random.default_rng(1).standard_normal((7, 9))
    found = pretrained.diagnose(stack, x)
    rows = found.rows()
    assert len(rows) == 3 and rows[2]["head"] == 2
    assert rows[1]["gap"] == found.heat("gap")[0, 1]
    header, *lines = found.to_csv(tmp_path / "t.csv").splitlines()
    assert header.startswith("layer,head,symmetry_defect") and len(lines) == 3
    assert (tmp_path / "t.csv").read_text().splitlines()[0] == header
    content = json.loads(found.to_json(tmp_path / "t.json"))
    assert content["heads"][1]["gap"] == rows[1]["gap"] and content["random"]["rank_share"] == 4 / 9
    assert {v["theorem"] for v in content["verdicts"]} == {v.theorem for v in found.verdicts}
    with pytest.raises(ValueError, match="No column 'gaps'; there are symmetry_defect"):
        found.heat("gaps")


def test_the_table_prints_beside_random_heads():
    stack, _ = flat_stack()
    console = Console(record=True, width=180, file=open("/dev/null", "w"))  # noqa: SIM115
    pretrained.diagnose(stack).print(console)
    text = console.export_text()
    console.file.close()
    assert "symmetry_defect" in text and "random" in text and "no tokens were given" in text


def test_one_token_and_one_head_give_a_table():
    q, key, v, o = factors(H=1)
    stack = pretrained.from_arrays(q[None], key[None], v[None], o[None])
    found = pretrained.diagnose(stack, np.random.default_rng(0).standard_normal((1, 9)))
    assert np.isnan(found.heat("overlap_max")).all() and found.heat("shadow").shape == (1, 1)
    assert json.loads(found.to_json())["heads"][0]["overlap_max"] is None


# ---- real heads ----


def test_real_heads_are_not_what_the_theorems_assume():
    for name in ("minilm-layer4-heads0to3.safetensors", "mgm-layers0and4.safetensors"):
        found = pretrained.diagnose(cut(name))
        defect = found.heat("symmetry_defect")
        assert (defect > 0.7).all() and (defect < 1.5).all()
        assert np.abs(found.heat("alignment")).max() < 0.55
        assert found.heat("query_angle_closest").min() < found.random["query_angle_closest"] - 15


def test_the_first_layer_of_the_gut_model_anticopies_and_the_fifth_copies():
    found = pretrained.diagnose(cut("mgm-layers0and4.safetensors"))
    assert abs(np.mean(found.heat("copying")[0]) + 0.40) < 0.005
    assert np.mean(found.heat("copying")[1]) > 0.4
    assert abs(np.mean(found.heat("score_rms")[0]) - 0.43) < 0.005
    assert abs(np.mean(found.heat("beta_op")[0]) - 33) < 0.5
