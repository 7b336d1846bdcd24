"""Damaged and hostile model files are refused with a clear error, and nothing in them runs."""

import json
import os
import pickle
import socket
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from checkpoints import CONFIGS, hostile_pickle, random_tensors, tensor_pickle, write_bin, write_folder

from attnflow import pretrained
from attnflow.pretrained.files import read_bin, read_json, read_safetensors

CONFIG = CONFIGS["bert"]


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "model", CONFIG, random_tensors(CONFIG))


# ---- pickles ----


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_payload_is_refused_and_does_not_run(tmp_path, protocol):
    mark = tmp_path / "ran"
    file = write_bin(tmp_path / "pytorch_model.bin", {}, hostile_pickle(mark, protocol))
    assert pickle.loads(hostile_pickle(mark, protocol)) and mark.exists()  # a plain unpickler runs it
    mark.rmdir()
    with pytest.raises(ValueError, match=r"refused: it asks for .*mkdir"):
        read_bin(file)
    assert not mark.exists()


@pytest.mark.parametrize(
    "name",
    [
        b"cos\nsystem\n",
        b"cbuiltins\neval\n",
        b"ctorch._utils\n_rebuild_parameter\n",
        b"ctorch\nload\n",
        b"ccollections\nOrderedDict.__init__\n",
        b"cattnflow.pretrained.files\nread_bin\n",
        b"cnumpy\nload\n",
        b"ccodecs\nencode\n",
    ],
)
def test_only_the_names_of_tensors_are_known_to_the_unpickler(tmp_path, name):
    file = write_bin(tmp_path / "m.bin", {}, b"\x80\x02}X\x01\x00\x00\x00a" + name + b"s.")
    with pytest.raises(ValueError, match="asks for"):
        read_bin(file)


def test_a_pickle_cannot_change_the_functions_it_may_call(tmp_path):
    # BUILD with (None, {"__defaults__": ...}) sets attributes on whatever is on the stack
    build = b"ctorch._utils\n_rebuild_tensor_v2\n(N}X\x0c\x00\x00\x00__defaults__(K\x01tstb"
    file = write_bin(tmp_path / "m.bin", {}, b"\x80\x02}X\x01\x00\x00\x00a" + build + b"s.")
    with pytest.raises(ValueError, match="refused"):
        read_bin(file)
    kind = b"ctorch\nFloatStorage\n(N}X\x04\x00\x00\x00kindX\x02\x00\x00\x00i1stb"
    good = write_bin(tmp_path / "n.bin", {"a": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match="refused"):
        read_bin(write_bin(tmp_path / "m.bin", {}, b"\x80\x02}X\x01\x00\x00\x00a" + kind + b"s."))
    assert np.array_equal(read_bin(good)["a"], np.ones(3))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("a", "FloatStorage", "0", 4, 1, (4,), (1,)), "ends at 4 in a storage of 4"),
        (("a", "FloatStorage", "0", 4, 0, (-1, 2), (2, 1)), "size"),
        (("a", "FloatStorage", "0", 4, -1, (2,), (1,)), "size"),
        (("a", "FloatStorage", "0", 4, 0, (2, 2), (1,)), "size"),
        (("a", "FloatStorage", "0", 4, 0, (2,), (-1,)), "size"),
        (("a", "FloatStorage", "0", 4, 0, (2**40,), (0,)), r"in a storage of 4"),
        (("a", "FloatStorage", "0", 5, 0, (4,), (1,)), "4 numbers instead of 5"),
        (("a", "FloatStorage", "../../0", 4, 0, (4,), (1,)), "missing"),
        (("a", "ComplexFloatStorage", "0", 2, 0, (2,), (1,)), "asks for torch.ComplexFloatStorage"),
    ],
)
def test_tensors_that_do_not_fit_their_storage_are_refused(tmp_path, entry, message):
    file = write_bin(tmp_path / "m.bin", {"a": np.zeros(4, np.float32)}, tensor_pickle([entry]))
    with pytest.raises(ValueError, match=message):
        read_bin(file)


def test_views_into_a_storage_are_read_as_they_are_strided(tmp_path):
    data = np.arange(12, dtype=np.float32)
    file = write_bin(
        tmp_path / "m.bin", {"a": data}, tensor_pickle([("a", "FloatStorage", "0", 12, 1, (3, 2), (2, 4))])
    )
    assert np.array_equal(read_bin(file)["a"], [[1, 5], [3, 7], [5, 9]])


def test_bin_files_of_other_forms_are_refused(tmp_path):
    weights = {"a": np.ones((2, 2), np.float32)}
    old = tmp_path / "old.bin"
    old.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match=r"not a whole zip-form \.bin"):
        read_bin(old)
    whole = write_bin(tmp_path / "whole.bin", weights)
    cut = tmp_path / "cut.bin"
    cut.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"not a whole zip-form \.bin"):
        read_bin(cut)
    with pytest.raises(ValueError, match="compressed"):
        read_bin(write_bin(tmp_path / "small.bin", weights, compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(ValueError, match="not tensors"):
        read_bin(write_bin(tmp_path / "list.bin", {}, pickle.dumps({"a": [1, 2]}, 2)))
    with pytest.raises(ValueError, match="dict of tensors"):
        read_bin(write_bin(tmp_path / "list.bin", {}, pickle.dumps([1], 2)))


def test_no_file_is_read_by_a_plain_unpickler():
    source = "\n".join(p.read_text() for p in Path(pretrained.__file__).parent.glob("*.py"))
    for call in ("pickle.load", "torch.load", "allow_pickle", "np.load", "joblib", "marshal", "eval(", "exec("):
        assert call not in source


# ---- safetensors ----


def _header(header, data=b"", length=None):
    raw = json.dumps(header).encode() if isinstance(header, dict) else header
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01\x00",
        _header({}, length=2**62),
        _header({}, length=10**9),
        _header(b"[" * 200_000),
        _header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 8),
        _header({"a": {"dtype": "F32", "shape": [2**61], "data_offsets": [0, 16]}}, b"\0" * 16),
        _header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 2**60]}}, b"\0" * 16),
        _header({"a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 0]}}, b"\0" * 16),
        _header({"a": {"dtype": "O", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 16),
    ],
)
def test_damaged_safetensors_are_refused(tmp_path, content):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        read_safetensors(file)


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.999])
def test_truncated_safetensors_are_refused(folder, kept):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        pretrained.from_huggingface(folder)


def test_any_damage_is_a_value_error_or_harmless(folder, tmp_path):
    binary = write_bin(tmp_path / "m.bin", random_tensors(CONFIG))
    rng = np.random.default_rng(0)
    for file, read, span in ((folder / "model.safetensors", read_safetensors, 3000), (binary, read_bin, None)):
        whole = file.read_bytes()
        for _ in range(150):
            broken = bytearray(whole)
            for place in rng.integers(0, span or len(whole), 3):
                broken[place] = rng.integers(256)
            target = tmp_path / ("broken" + file.suffix)
            target.write_bytes(broken)
            try:
                tensors = read(target)
                for name in tensors:
                    assert tensors[name].shape == tensors.shape(name)
            except ValueError:
                pass


# ---- folders ----


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..\\x",
        "",
        ".",
        "..",
        None,
        3,
        ["x"],
        "missing.safetensors",
    ],
)
def test_an_index_names_files_beside_it_and_nothing_else(folder, name):
    (folder.parent / "secret.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    index = {"weight_map": {"embeddings.LayerNorm.bias": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"not a plain file name|is not a file"):
        pretrained.from_huggingface(folder)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "{", "[" * 100_000, "\udcff"])
def test_an_index_that_is_none_is_refused(folder, index):
    (folder / "model.safetensors.index.json").write_text(index, errors="surrogateescape")
    with pytest.raises(ValueError, match=r"weight_map|JSON"):
        pretrained.from_huggingface(folder)


def test_an_index_must_be_right_about_its_shards(folder):
    index = {"weight_map": {"no.such.tensor": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"no\.such\.tensor"):
        pretrained.from_huggingface(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_links_out_of_the_folder_are_refused(folder, name):
    outside = folder.parent / name
    os.rename(folder / name, outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(ValueError, match=r"links to .* outside the folder"):
        pretrained.from_huggingface(folder)


def test_the_links_of_a_hub_cache_are_followed(folder):
    blobs, snapshot = folder.parent / "m" / "blobs", folder.parent / "m" / "snapshots" / "rev"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate(("model.safetensors", "config.json")):
        os.rename(folder / name, blobs / str(number))
        (snapshot / name).symlink_to(Path("../../blobs") / str(number))
    assert len(pretrained.from_huggingface(snapshot)) == 2


def test_folders_without_weights_and_names_of_models_are_refused(folder, tmp_path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        pretrained.from_huggingface(folder)
    with pytest.raises(ValueError, match="not looked up anywhere"):
        pretrained.from_huggingface("bert-base-uncased")
    with pytest.raises(ValueError, match="is not a file"):
        pretrained.from_huggingface(tmp_path)


def test_json_larger_than_it_can_be_is_not_read(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(" " * 2000 + "{}")
    with pytest.raises(ValueError, match="more than the 1000"):
        read_json(file, 1000)
    assert read_json(file) == {}


def test_special_files_are_not_opened(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ValueError, match="is not a file"):
        pretrained.from_huggingface(folder)


def test_nothing_is_fetched(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    stack = pretrained.from_huggingface(folder)
    assert pretrained.diagnose(stack, stack.embed([1, 2, 3])).heat("gap").shape == (2, 2)
