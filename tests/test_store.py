"""The store of a sweep: bits survive, damage is noticed, the wrong sweep and the second writer are refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import attnflow
from attnflow.store import StoreBusy, StoreMismatch, digest, load_store, lock, open_store

PACKAGE = Path(attnflow.__file__).parent
VARIABLES = {
    "cosine": {"shape": [5], "dtype": "float64"},
    "shadow": {"shape": [2, 3], "dtype": "float32"},
    "status": {"shape": [], "dtype": "int64"},
    "reached": {"shape": [], "dtype": "bool"},
    "none": {"shape": [0], "dtype": "float64"},
}
SPEC = {"chunk": 4, "chunks": 3, "variables": VARIABLES, "beta": [0.1, 1e300], "facts": {"threads": 2}}


def block(chunk, spec=SPEC):
    """A chunk with all that a float can be: NaN of any payload, infinities, signed zeros, subnormals."""
    rng = np.random.default_rng(chunk)
    values = {}
    for name, variable in spec["variables"].items():
        raw = rng.integers(0, 256, (spec["chunk"], *variable["shape"], 8), np.uint8)
        dtype = np.dtype(variable["dtype"])
        values[name] = np.ascontiguousarray(raw[..., : dtype.itemsize]).view(dtype)[..., 0]
    values["reached"] = rng.integers(0, 2, spec["chunk"]).astype(bool)
    return values


def same_bits(a, b):
    return a.keys() == b.keys() and all(a[k].tobytes() == b[k].tobytes() and a[k].dtype == b[k].dtype for k in a)


def filled(path, spec=SPEC):
    with lock(path):
        at = open_store(path, spec)
        for chunk in range(spec["chunks"]):
            at.put(chunk, block(chunk, spec))
    return at


def files(path):
    return sorted(p for p in path.rglob("*") if p.is_file() and p.name != "lock")


def test_every_bit_comes_back(tmp_path):
    filled(tmp_path)
    at = load_store(tmp_path)
    assert at.missing() == []
    for chunk in range(3):
        assert same_bits(at.get(chunk), block(chunk))


@pytest.mark.parametrize("bits", [0x7FF8000000000000, 0xFFF8000000000000, 0x0, 0x8000000000000000])
def test_a_chunk_of_fill_values_keeps_its_bits(tmp_path, bits):
    values = {**block(0), "cosine": np.full((4, 5), bits, np.uint64).view(np.float64)}
    at = open_store(tmp_path, SPEC)
    at.put(0, values)
    assert same_bits(load_store(tmp_path).get(0), values)


def test_a_store_is_the_same_files_whatever_the_order_of_its_chunks(tmp_path):
    filled(tmp_path / "a")
    (tmp_path / "b").mkdir()
    at = open_store(tmp_path / "b", SPEC)
    for chunk in (2, 0, 1, 0):
        at.put(chunk, block(chunk))
    names = [p.relative_to(tmp_path / "a") for p in files(tmp_path / "a")]
    assert names == [p.relative_to(tmp_path / "b") for p in files(tmp_path / "b")]
    assert all((tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names)


def flip(data):
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 4]) + data[len(data) // 2 + 1 :]


FAULTS = {"flipped": flip, "truncated": lambda d: d[: len(d) // 2], "emptied": lambda d: b"", "deleted": None}


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_to_any_file_is_noticed_and_repaired_by_running_again(tmp_path, fault):
    before = {p: p.read_bytes() for p in files(filled(tmp_path).path)}
    for path in before:
        if path.name == "spec.json":
            continue
        path.unlink() if FAULTS[fault] is None else path.write_bytes(FAULTS[fault](before[path]))
        at = open_store(tmp_path, SPEC)
        for chunk in (missing := at.missing()):
            at.put(chunk, block(chunk))
        assert {p: p.read_bytes() for p in files(tmp_path)} == before, path
        assert path.name == "zarr.json" or len(missing) == 1, path


def test_zarr_alone_would_not_notice(tmp_path):
    """Without the manifest a deleted chunk reads as NaN and a flipped bit as a number."""
    import zarr

    at = filled(tmp_path)
    (tmp_path / "data" / "cosine" / "c.1.0").unlink()
    assert np.isnan(zarr.open_array(tmp_path / "data" / "cosine", mode="r")[4:8]).all()
    assert at.get(1) is None


def test_manifests_of_another_store_or_chunk_do_not_count(tmp_path):
    filled(tmp_path / "a")
    filled(tmp_path / "b", {**SPEC, "beta": [2.0]})
    manifests = tmp_path / "a" / "manifest"
    (manifests / "000000.json").write_bytes((tmp_path / "b" / "manifest" / "000000.json").read_bytes())
    (manifests / "000001.json").write_bytes((manifests / "000002.json").read_bytes())
    assert load_store(tmp_path / "a").missing() == [0, 1]


def test_another_sweep_is_refused_with_what_differs(tmp_path):
    filled(tmp_path)
    with pytest.raises(StoreMismatch, match=r"facts\.threads \(2 in the store, 1 now\)"):
        open_store(tmp_path, {**SPEC, "facts": {"threads": 1}})
    with pytest.raises(StoreMismatch, match=r"beta .*; config \(null in the store, \"x\" now\)"):
        open_store(tmp_path, {**SPEC, "beta": [0.1], "config": "x"})
    assert load_store(tmp_path).missing() == []


def test_a_folder_with_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreMismatch, match=r"thesis\.tex but no spec\.json"):
        open_store(tmp_path, SPEC)


def test_a_damaged_specification_is_refused(tmp_path):
    filled(tmp_path)
    spec = tmp_path / "spec.json"
    spec.write_bytes(spec.read_bytes()[:-5])
    with pytest.raises(StoreMismatch, match="damaged"):
        open_store(tmp_path, SPEC)


def test_other_bits_for_a_finished_chunk_are_refused_and_change_nothing(tmp_path):
    at = filled(tmp_path)
    values = block(1)
    values["cosine"] = np.nextafter(np.nan_to_num(values["cosine"]), 1)
    with pytest.raises(StoreMismatch, match=r"chunk 1 .* other bits in \['cosine'\]"):
        at.put(1, values)
    assert same_bits(at.get(1), block(1))


def test_wrong_names_shapes_and_dtypes_are_refused(tmp_path):
    at = open_store(tmp_path, SPEC)
    with pytest.raises(ValueError, match="`values` must have"):
        at.put(0, {"cosine": np.zeros((4, 5))})
    with pytest.raises(ValueError, match="`cosine` must be float64"):
        at.put(0, {**block(0), "cosine": np.zeros((4, 6))})
    with pytest.raises(ValueError, match="`cosine` must be float64"):
        at.put(0, {**block(0), "cosine": np.zeros((4, 5), np.float32)})
    assert at.missing() == [0, 1, 2]


def test_digest_sees_bits_and_not_memory_layout():
    a = np.arange(12.0).reshape(3, 4)
    assert digest(a) == digest(np.asfortranarray(a)) == digest(a.astype(">f8"))
    assert digest(np.zeros(1)) != digest(-np.zeros(1))


def child(code, *arguments):
    """A real process that runs code with the store module alone, which starts faster than the whole package."""
    code = (
        f"import sys, time\nsys.path.insert(0, {str(PACKAGE)!r})\nfrom pathlib import Path\nfrom store import *\n{code}"
    )
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def test_a_second_writer_is_refused_with_pid_and_host_until_the_first_is_killed(tmp_path):
    code = "with lock(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"
    first = child(code, tmp_path)
    try:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(StoreBusy, match=rf"pid {first.pid} on {os.uname().nodename}"), lock(tmp_path):
            pass
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    with lock(tmp_path):
        pass


WRITER = """
import json, resource, signal
import numpy as np
path, limit = Path(sys.argv[1]), int(sys.argv[2])
spec = {"chunk": 16, "chunks": 8, "variables": {"x": {"shape": [1024], "dtype": "float64"}}}
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
at = open_store(path, spec)
for chunk in range(8):
    if limit and chunk == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        at.put(chunk, {"x": np.random.default_rng(chunk).normal(size=(16, 1024))})
    except OSError as error:
        print(json.dumps([chunk, error.errno, str(error)]))
        break
"""


@pytest.fixture(params=["file system", "file size"])
def little_room(request, tmp_path):
    """A folder with room for one chunk of 128 KiB: a tiny file system where the kernel lets us mount one, else a limit."""
    if request.param == "file size":
        yield tmp_path, 4096
        return
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=320k", "tmpfs", tmp_path], capture_output=True)
    yield tmp_path, 0 if mounted.returncode == 0 else 4096
    if mounted.returncode == 0:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_full_disk_is_named_and_leaves_the_store_intact(little_room):
    path, limit = little_room
    out, _ = child(WRITER, path / "store", limit).communicate(timeout=60)
    chunk, errno, message = json.loads(out)
    assert errno in (28, 27)  # no space left on device, file too large
    assert f"cannot write chunk {chunk} of the store" in message and "free some space and run again" in message
    at = load_store(path / "store")
    assert chunk >= 1 and at.missing() == list(range(chunk, 8))
    assert np.array_equal(at.get(0)["x"], np.random.default_rng(0).normal(size=(16, 1024)))
    assert not [p for p in files(path) if p.suffix in (".partial", ".temporary")]


KILLED = """
import numpy as np
spec = {"chunk": 4, "chunks": int(sys.argv[2]), "variables": {"x": {"shape": [64], "dtype": "float64"}}}
with lock(Path(sys.argv[1])):
    at = open_store(Path(sys.argv[1]), spec)
    print(len(at.missing()), flush=True)
    for chunk in at.missing():
        at.put(chunk, {"x": np.random.default_rng(chunk).normal(size=(4, 64))})
"""


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_writer_killed_at_random_moments_loses_nothing_that_was_finished(tmp_path, kills):
    rng, chunks, finished = np.random.default_rng(kills), 10 * kills, 0
    for _ in range(kills):
        writer = child(KILLED, tmp_path / "killed", chunks)
        left = int(writer.stdout.readline())
        assert chunks - left >= finished  # nothing that was finished is computed again
        time.sleep(rng.uniform(0.0, 0.06))
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        finished = chunks - len(load_store(tmp_path / "killed").missing())
    for name in ("killed", "undisturbed"):
        child(KILLED, tmp_path / name, chunks).communicate(timeout=120)
    names = [p.relative_to(tmp_path / "killed") for p in files(tmp_path / "killed")]
    assert names == [p.relative_to(tmp_path / "undisturbed") for p in files(tmp_path / "undisturbed")]
    assert all((tmp_path / "killed" / n).read_bytes() == (tmp_path / "undisturbed" / n).read_bytes() for n in names)
