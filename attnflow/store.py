"""A sweep on disk: chunks of results that survive `kill -9`, a full disk and flipped bits.

    STORE/spec.json            what the sweep is; the sha256 of its canonical form is the store's identity
    STORE/lock                 held (flock) by the one driving process; names its pid and host
    STORE/data/NAME/           zarr v3 array of one variable; one zarr chunk = one chunk of work
    STORE/manifest/000012.json checksums (sha256) of chunk 12 of every variable, and the store's identity

A chunk counts as done if and only if its manifest is whole and carries the store's identity, and the bytes
read back have its checksums: zarr alone reads a missing chunk as fill values and a flipped bit as a number.
Data are on disk (fsync) before their manifest, and the manifest appears whole or not at all (link of a synced
temporary file), so the process may die at any moment. Writing a chunk twice is harmless: correctness does not
rest on the lock, which saves double work.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import socket
from collections.abc import Generator, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np


class StoreMismatch(ValueError):
    """The store holds another sweep, or a recomputed chunk came out with other bits."""


class StoreBusy(RuntimeError):
    """Another process drives this store."""


def canonical(spec: Mapping) -> bytes:
    """The one byte string of a specification: sorted keys, no blanks, ASCII, no NaN."""
    return json.dumps(spec, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def digest(array: np.ndarray) -> str:
    """Sha256 of an array's elements in C order, little-endian."""
    plain = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return hashlib.sha256(plain.tobytes()).hexdigest()


@contextlib.contextmanager
def lock(path: Path) -> Generator[None]:
    """Hold the store as its only driver; `StoreBusy` names the pid and host of whoever holds it already.

    The kernel drops the lock with the process, also after `kill -9`.
    """
    import fcntl  # absent on Windows, where only stores are unavailable

    path.mkdir(parents=True, exist_ok=True)
    with open(path / "lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            raise StoreBusy(
                f"`store` {path} is being written by {owner}; wait for it, end it, or choose another store."
            ) from None
        file.truncate(0)
        file.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def read_spec(path: Path) -> dict | None:
    """The specification of the store at `path`, or None where there is none yet."""
    try:
        spec = json.loads((path / "spec.json").read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise StoreMismatch(f"{path / 'spec.json'} is damaged ({error}); choose another store.") from None
    numbers = [spec.get(name) for name in ("chunk", "chunks")] if isinstance(spec, dict) else [None]
    if not all(type(number) is int and number >= 0 for number in numbers) or not isinstance(
        spec.get("variables"), dict
    ):
        raise StoreMismatch(f"{path / 'spec.json'} is not the specification of a store; choose another store.")
    return spec


def open_store(path: Path, spec: Mapping) -> "Store":
    """Create the store of `spec` at `path`, or continue it. Call it under `lock`.

    `spec` is JSON and holds at least chunk (lanes per chunk), chunks (their number) and variables
    {name: {shape (of one lane), dtype}}. `StoreMismatch` lists in what another sweep at `path` differs.
    """
    spec = json.loads(canonical(spec))
    try:
        path.mkdir(parents=True, exist_ok=True)
        old = read_spec(path)
        if old is None:
            _refuse_foreign_folder(path)
            _publish(path / "spec.json", canonical(spec))
        else:
            refuse_change(path, old, spec)
        store = Store(path, spec)
        store.prepare()
    except OSError as error:
        raise _explained(error, f"cannot prepare the store {path}") from error
    return store


def refuse_change(path: Path, old: Mapping, new: Mapping) -> None:
    """Raise `StoreMismatch` with what differs, where two specifications (or the same part of them) differ."""
    if old != new:
        changes = "; ".join(_differences(old, new))
        raise StoreMismatch(
            f"`store` {path} holds another sweep. Choose another store, or undo the change of {changes}."
        )


def load_store(path: Path) -> "Store":
    """The store that lies at `path`, for reading."""
    spec = read_spec(path)
    if spec is None:
        raise FileNotFoundError(f"there is no store at {path}: no spec.json.")
    return Store(path, spec)


@dataclasses.dataclass(frozen=True)
class Store:
    """One sweep's chunks on disk; made by `open_store` (to write) or `load_store` (to read)."""

    path: Path
    spec: dict

    @cached_property
    def key(self) -> str:
        """The store's identity."""
        return hashlib.sha256(canonical(self.spec)).hexdigest()

    def prepare(self) -> None:
        """Make the folders and array headers; remove what killed writers left half-written."""
        (self.path / "manifest").mkdir(exist_ok=True)
        for name in self.spec["variables"]:
            try:
                self._array(name, "r+")
            except Exception:  # a missing or damaged header, whatever the reader says; the spec knows it
                self._create(name)
        self.tidy()

    def tidy(self) -> None:
        """Remove what killed writers left half-written. Call it under `lock`, with no writer at work."""
        for left in (*self.path.glob("**/*.partial"), *self.path.glob("**/*.temporary")):
            left.unlink(missing_ok=True)

    def put(self, chunk: int, values: Mapping[str, np.ndarray]) -> None:
        """Write one chunk: every variable, of shape (lanes, ...).

        Raises `StoreMismatch` where the chunk is recorded with other bits (other hardware or settings), and
        `OSError` on a full disk, with the chunks already written intact.
        """
        if set(values) != set(self.spec["variables"]):
            raise ValueError(f"`values` must have {sorted(self.spec['variables'])}, got {sorted(values)}.")
        sums = {name: digest(block) for name, block in values.items()}
        recorded = self._manifest(chunk)
        self._refuse_other_bits(chunk, recorded, sums)
        bad = {k: int(np.sum(~np.isfinite(v))) for k, v in values.items() if v.dtype.kind in "fc"}
        entry = _sealed({"chunk": chunk, "nonfinite": bad, "sha256": sums, "spec": self.key})
        try:
            for name, block in values.items():
                self._write(name, chunk, block)
            if recorded is None:
                self._manifest_path(chunk).unlink(missing_ok=True)  # a torn one
                _publish(self._manifest_path(chunk), canonical(entry))
                self._refuse_other_bits(chunk, self._manifest(chunk), sums)
        except OSError as error:
            raise _explained(error, f"cannot write chunk {chunk} of the store {self.path}") from error

    def get(self, chunk: int) -> dict[str, np.ndarray] | None:
        """One chunk's variables; None unless the chunk is done."""
        entry = self._manifest(chunk)
        if entry is None:
            return None
        values = {}
        for name in self.spec["variables"]:
            try:
                values[name] = np.asarray(self._array(name)[self._lanes(chunk)])
            except Exception:  # a truncated or undecodable file: every error of the reader means damage
                return None
            if digest(values[name]) != entry["sha256"].get(name):
                return None
        return values

    def missing(self) -> list[int]:
        """The chunks that are not done, in order; reads and checks every byte of those that are."""
        return [chunk for chunk in range(self.spec["chunks"]) if self.get(chunk) is None]

    def _lanes(self, chunk: int) -> slice:
        return slice(chunk * self.spec["chunk"], (chunk + 1) * self.spec["chunk"])

    def _block(self, name: str) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of one chunk of a variable."""
        variable = self.spec["variables"][name]
        return (self.spec["chunk"], *variable["shape"]), np.dtype(variable["dtype"])

    def _manifest_path(self, chunk: int) -> Path:
        return self.path / "manifest" / f"{chunk:06d}.json"

    def _manifest(self, chunk: int) -> dict | None:
        try:
            entry = json.loads(self._manifest_path(chunk).read_bytes())
            ours = entry["chunk"] == chunk and entry["spec"] == self.key
            return entry if ours and entry == _sealed(entry) else None
        except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _refuse_other_bits(self, chunk: int, entry: dict | None, sums: Mapping[str, str]) -> None:
        if entry is not None and entry["sha256"] != sums:
            names = sorted(name for name in sums if entry["sha256"].get(name) != sums[name])
            raise StoreMismatch(
                f"chunk {chunk} of {self.path} was recomputed with other bits in {names}: the recorded ones "
                "were made on other hardware or with other settings. Recompute the sweep in a new store."
            )

    def _array(self, name: str, mode: Literal["r", "r+"] = "r"):
        import zarr

        # A chunk of NaN is written like any other: read as fill values, its NaN could have other bits.
        array = zarr.open_array(self.path / "data" / name, mode=mode, zarr_format=3)
        array = array.with_config({"write_empty_chunks": True})
        shape, dtype = self._block(name)
        if array.chunks != _positive(shape) or array.dtype != dtype:
            raise ValueError(f"the header of {name} in {self.path} is not the one of the specification.")
        return array

    def _create(self, name: str) -> None:
        import zarr

        folder = self.path / "data" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "zarr.json").unlink(missing_ok=True)
        shape, dtype = self._block(name)
        zarr.create_array(
            folder,
            shape=(shape[0] * self.spec["chunks"], *shape[1:]),
            chunks=_positive(shape),
            dtype=dtype,
            fill_value=np.nan if dtype.kind in "fc" else 0,
            chunk_key_encoding={"name": "default", "separator": "."},
            zarr_format=3,
        )
        _sync(folder / "zarr.json")

    def _write(self, name: str, chunk: int, block: np.ndarray) -> None:
        shape, dtype = self._block(name)
        if block.shape != shape or block.dtype != dtype:
            raise ValueError(f"`{name}` must be {dtype} of shape {shape}, got {block.dtype} of {block.shape}.")
        if block.size:
            self._array(name, "r+")[self._lanes(chunk)] = block
            _sync(self.path / "data" / name / f"c.{chunk}{'.0' * (len(shape) - 1)}")


def _sealed(entry: Mapping) -> dict:
    """A manifest with its own checksum: a flipped bit in a recorded one must not pass for other results."""
    content = {key: value for key, value in entry.items() if key != "seal"}
    return {**content, "seal": hashlib.sha256(canonical(content)).hexdigest()}


def _positive(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Zarr wants chunk lengths of at least one, also along an axis of length zero."""
    return tuple(max(1, size) for size in shape)


def _refuse_foreign_folder(path: Path) -> None:
    """A folder with anything but what a driver killed at its very start leaves is not ours to fill."""
    foreign = [p.name for p in path.iterdir() if p.name != "lock" and p.suffix != ".temporary"]
    if foreign:
        raise StoreMismatch(f"`store` {path} holds {foreign[0]} but no spec.json; choose another folder.")


def _sync(path: Path) -> None:
    """Make a file and its name durable."""
    for target in (path, path.parent):
        handle = os.open(target, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _publish(path: Path, data: bytes) -> None:
    """Let a file appear whole, durable and exclusively; one that is there stays."""
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.temporary")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        _sync(path)
    finally:
        temporary.unlink(missing_ok=True)


def _explained(error: OSError, what: str) -> OSError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    remedy = "free some space" if full else "remove the cause"
    reason = f"{what}: {error.strerror or error}. What was written stays intact"
    return OSError(error.errno, f"{reason}; {remedy} and run again to resume")


def _differences(old: Mapping, new: Mapping, at: str = "") -> Iterator[str]:
    """The entries in which two specifications differ, as phrases."""
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            yield from _differences(a, b, f"{at}{key}.")
        elif a != b:
            yield f"{at}{key} ({_short(a)} in the store, {_short(b)} now)"


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
