"""Heads and arrays in files: what is read is what was written, and nothing hostile is."""

import io
import json
import zipfile

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import safetensors.numpy

from attnflow import AlignedHeads, FactoredHeads, Heads, ScalarHeads, heads
from attnflow.constrained import FixedNormHeads, SemidefiniteHeads, gapped, on_planes
from attnflow.files import load_array, load_heads, publish, save_heads


def families():
    key = jr.key(0)
    plain = heads.orthogonal(key, 2, 6, 3)
    return [
        heads.gaussian(key, 3, 4),
        plain,
        ScalarHeads([1.0, -2.0]),
        FactoredHeads(*jr.normal(key, (3, 2, 3, 5)), jr.normal(key, (2, 5, 3))),
        SemidefiniteHeads(jr.normal(key, (2, 3, 5))),
        on_planes(plain, 3),
        gapped(key, 2, 4, 0.5),
        FixedNormHeads(on_planes(plain, 3), jnp.array([1.0, 2.0])),
    ]


@pytest.mark.parametrize("made", families(), ids=lambda made: type(made).__name__)
def test_heads_come_back_bit_for_bit_with_their_class_and_dtype(made, tmp_path, dtype):
    made = jax.tree.map(lambda a: a.astype(dtype), made)
    save_heads(tmp_path / "heads.safetensors", made, facts={"seed": 3})
    back = load_heads(tmp_path / "heads.safetensors")
    assert jax.tree.structure(back) == jax.tree.structure(made)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(made), strict=True):
        assert a.dtype == dtype and np.array_equal(a, b)


def test_heads_of_other_programs_need_only_their_arrays(tmp_path):
    M = np.random.default_rng(0).normal(size=(2, 3, 3))
    path = tmp_path / "other.safetensors"
    safetensors.numpy.save_file({"score": M, "value": 2 * M}, path)
    back = load_heads(path)
    assert isinstance(back, Heads) and np.array_equal(back.value, 2 * M)
    safetensors.numpy.save_file({"raw": M}, path)
    assert isinstance(load_heads(path), AlignedHeads)
    safetensors.numpy.save_file({"weight": M}, path)
    with pytest.raises(ValueError, match="`score` and `value`"):
        load_heads(path)


def test_a_class_this_version_does_not_know_is_refused(tmp_path):
    path = tmp_path / "heads.safetensors"
    metadata = {"format": "attnflow heads 1", "classes": json.dumps({"": "Path"}), "facts": "{}"}
    safetensors.numpy.save_file({"raw": np.zeros((1, 2, 2))}, path, metadata)
    with pytest.raises(ValueError, match="does not know"):
        load_heads(path)
    metadata["classes"] = json.dumps({"": "Heads"})
    safetensors.numpy.save_file({"score": np.zeros((1, 2, 2))}, path, metadata)
    with pytest.raises(ValueError, match="lacks the array `value`"):
        load_heads(path)


def test_heads_that_are_not_finite_are_refused(tmp_path):
    save_heads(tmp_path / "a.safetensors", ScalarHeads([1.0, np.nan]))
    with pytest.raises(ValueError, match="strengths must be finite"):
        load_heads(tmp_path / "a.safetensors")


def test_arrays_are_read_from_three_formats(tmp_path, dtype):
    x = np.random.default_rng(0).normal(size=(5, 3)).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", tokens=x, other=np.arange(3))
    np.savez_compressed(tmp_path / "one.npz", tokens=x)
    safetensors.numpy.save_file({"tokens": x, "other": np.arange(3)}, tmp_path / "x.safetensors")
    for back in (
        load_array(tmp_path / "x.npy"),
        load_array(tmp_path / "x.npz", "tokens"),
        load_array(tmp_path / "one.npz"),
        load_array(tmp_path / "x.safetensors", "tokens"),
    ):
        assert back.dtype == dtype and np.array_equal(back, x)
    for name in ("x.npz", "x.safetensors"):
        with pytest.raises(ValueError, match="choose `name` among"):
            load_array(tmp_path / name)
        with pytest.raises(ValueError, match="no array `weights`"):
            load_array(tmp_path / name, "weights")


class Trap:
    """Runs code when unpickled."""

    def __reduce__(self):
        return (open, ("/nowhere/attnflow", "w"))


@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_pickled_objects_are_never_loaded(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    objects = np.array([Trap()], dtype=object)
    np.save(path, objects, allow_pickle=True) if suffix == "npy" else np.savez(path, x=objects)
    with pytest.raises(ValueError, match="pickled objects"):
        load_array(path)


def test_an_array_larger_than_allowed_is_refused_by_its_header(tmp_path):
    x = np.zeros((100, 10))
    np.save(tmp_path / "x.npy", x)
    np.savez_compressed(tmp_path / "x.npz", x=x)
    safetensors.numpy.save_file({"x": x}, tmp_path / "x.safetensors")
    for name in ("x.npy", "x.npz", "x.safetensors"):
        assert load_array(tmp_path / name, largest=8000).shape == (100, 10)
        with pytest.raises(ValueError, match="8000 bytes, more than the 7999"):
            load_array(tmp_path / name, largest=7999)


def test_a_small_archive_that_claims_a_huge_array_is_refused_before_it_is_unpacked(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (10**7, 10**7)})
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(10**6))
    with pytest.raises(ValueError, match="more than"):
        load_array(tmp_path / "bomb.npz")


@pytest.mark.parametrize(
    "array, message",
    [(np.array([1.0, np.inf]), "must be finite"), (np.array([1j]), "real numbers"), (np.array(["a"]), "real numbers")],
)
def test_numbers_must_be_real_and_finite(array, message, tmp_path):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(ValueError, match=message):
        load_array(tmp_path / "x.npy")
    with pytest.raises(ValueError, match=r"must end in \.npy"):
        load_array(tmp_path / "x.txt")


def test_a_published_file_replaces_the_old_one_and_leaves_nothing_else(tmp_path):
    publish(tmp_path / "a", b"old")
    publish(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new" and [p.name for p in tmp_path.iterdir()] == ["a"]
