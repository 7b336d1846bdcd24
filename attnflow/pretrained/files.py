"""Named arrays from model files, read without running anything that is in them.

A file that came from elsewhere may be damaged or hostile: every name, size and offset in it is checked against the
file before use, a pickle is read by an interpreter that knows five names, and nothing is ever fetched.
"""

import json
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

MEBIBYTE = 2**20


class Tensors(Mapping[str, np.ndarray]):
    """Arrays by name, read when asked for; `shape(name)` reads none of the data."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], read: Callable[[str], np.ndarray], source: str):
        self._shapes, self._read, self.source = shapes, read, source

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._shapes:
            raise KeyError(name)
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def from_mapping(arrays: Mapping[str, np.ndarray], source: str) -> Tensors:
    """Arrays that are in memory already."""
    return Tensors({name: np.shape(a) for name, a in arrays.items()}, arrays.__getitem__, source)


def regular_file(path: Path, limit: int | None = None) -> Path:
    if not path.is_file():
        raise ValueError(f"{path} is not a file.")
    if limit is not None and path.stat().st_size > limit:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, more than the {limit} that such a file can need.")
    return path


def read_json(path: Path, limit: int = 64 * MEBIBYTE) -> dict:
    """A JSON object from a file of at most `limit` bytes.

    **Errors:** ValueError where it is no JSON object.
    """
    try:
        value = json.loads(regular_file(path, limit).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as problem:
        raise ValueError(f"{path} is not JSON: {problem}.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}.")
    return value


def inside(folder: Path, name: object) -> Path:
    """The file `name` of a folder, refused where it lies outside.

    A link may point out of the folder only the way a local hub cache does it: from `snapshots/REVISION/` to the
    `blobs/` of the same model.
    """
    if not isinstance(name, str) or not name or Path(name).name != name or "\\" in name or name in (".", ".."):
        raise ValueError(f"{folder}: {name!r} is not a plain file name; an index may only name files beside it.")
    home, target = folder.resolve(), (folder / name).resolve()
    cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if target.parent != home and not cached:
        raise ValueError(f"{folder / name} links to {target}, outside the folder; copy the file into it.")
    return target


def open_folder(folder: Path) -> Tensors:
    """The tensors of a model folder: safetensors before .bin, one file or the shards of an index.

    **Errors:** ValueError where there are none, or where an index names a file that is missing or lies elsewhere.
    """
    for name, reader in (("model.safetensors", read_safetensors), ("pytorch_model.bin", read_bin)):
        index = folder / f"{name}.index.json"
        if index.exists():
            return _sharded(folder, read_json(inside(folder, index.name)), reader)
        if (folder / name).exists():
            return reader(inside(folder, name))
    raise ValueError(f"{folder} has neither model.safetensors nor pytorch_model.bin, nor an index of their shards.")


def _sharded(folder: Path, index: dict, reader: Callable[[Path], Tensors]) -> Tensors:
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{folder}: the index has no `weight_map`.")
    places = [inside(folder, name) for name in where.values()]  # checked before any is opened
    opened = {place: reader(place) for place in dict.fromkeys(places)}
    shards = {name: opened[place] for name, place in zip(where.values(), places, strict=True)}
    for name, shard in where.items():
        if name not in shards[shard]:
            raise ValueError(f"{folder}: the index says that {shard} holds {name!r}, which it does not.")
    shapes = {name: shards[shard].shape(name) for name, shard in where.items()}
    return Tensors(shapes, lambda name: shards[where[name]][name], str(folder))


def read_safetensors(path: Path) -> Tensors:
    """The tensors of a safetensors file; float16 and bfloat16 come out as float32.

    **Errors:** ValueError where the header does not fit the file.
    """
    try:
        handle = safe_open(regular_file(path), framework="numpy")
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 - no __iter__
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        kinds = {name: part.get_dtype() for name, part in slices.items()}
    except (SafetensorError, OSError) as problem:
        raise ValueError(f"{path} is not a whole safetensors file: {problem}.") from None

    def read(name):
        if kinds[name] not in _KINDS:
            raise ValueError(f"{path}: {name!r} has the type {kinds[name]}; known are {', '.join(_KINDS)}.")
        return _widen(handle.get_tensor(name))

    return Tensors(shapes, read, str(path))


_KINDS = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")


def _widen(a: np.ndarray) -> np.ndarray:
    return a.astype(np.float32) if a.dtype.itemsize == 2 and a.dtype.kind not in "iu" else a


# what a torch storage class says about its bytes; bfloat16 is the upper half of a float32
_STORAGES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "i1",
    "ByteStorage": "u1",
    "BoolStorage": "?",
}


class _Storage:
    __slots__ = ("kind",)

    def __init__(self, kind):
        self.kind = kind


class _Rebuild:
    """Stands for `torch._utils._rebuild_tensor_v2`; without `__dict__`, so that a pickle cannot change it."""

    __slots__ = ()

    def __call__(self, storage, offset, size, stride, requires_grad=False, hooks=None, metadata=None):
        if not isinstance(storage, np.ndarray) or storage.ndim != 1:
            raise pickle.UnpicklingError("a tensor that is not a view of a storage")
        numbers = (offset, *size, *stride)
        if len(size) != len(stride) or not all(type(i) is int and i >= 0 for i in numbers):
            raise pickle.UnpicklingError(f"a tensor of size {size} and stride {stride}")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if 0 not in size and last >= storage.size:
            raise pickle.UnpicklingError(f"a tensor that ends at {last} in a storage of {storage.size}")
        if math.prod(size) > max(storage.size, 1):
            raise pickle.UnpicklingError(f"a tensor of size {size} in a storage of {storage.size}")
        if 0 in size:
            return np.zeros(size, storage.dtype)
        step = tuple(s * storage.itemsize for s in stride)
        return np.lib.stride_tricks.as_strided(storage[offset:], size, step, writeable=False)


class _Restricted(pickle.Unpickler):
    def __init__(self, file, storage):
        super().__init__(file, encoding="utf-8")
        self.storage = storage

    def find_class(self, module, name):
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Rebuild()
        if module == "torch" and name in _STORAGES:
            return _Storage(_STORAGES[name])
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no table of tensors needs")

    def persistent_load(self, pid):
        match pid:
            case ("storage", _Storage() as storage, str() as key, _, int() as count):
                return self.storage(key, storage.kind, count)
        raise pickle.UnpicklingError("an object outside the file")


def read_bin(path: Path) -> Tensors:
    """The tensors of a zip-form `.bin` file, by an unpickler that knows tensors, storages and OrderedDict only.

    Any other name in the pickle is refused before it is looked up, so no code of the file runs.

    **Errors:** ValueError where the file is damaged, compressed, in the form from before 2020, or asks for more.
    """
    try:
        with zipfile.ZipFile(regular_file(path)) as archive:
            arrays = _unpickle(archive, path.stat().st_size)
    except zipfile.BadZipFile:
        raise ValueError(f"{path} is not a whole zip-form .bin file; save it as safetensors.") from None
    except Exception as problem:  # a hostile pickle can raise anything
        raise ValueError(f"{path} is refused: {problem or type(problem).__name__}.") from None
    return from_mapping({name: _widen(a) for name, a in arrays.items()}, str(path))


def _unpickle(archive: zipfile.ZipFile, size: int) -> dict[str, np.ndarray]:
    entries = {entry.filename: entry for entry in archive.infolist()}
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
        raise ValueError("it has compressed entries, which such a file never has")
    if sum(entry.file_size for entry in entries.values()) > size:
        raise ValueError("its entries claim more bytes than it has")
    tables = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(tables) != 1:
        raise ValueError(f"it must hold one data.pkl, got {len(tables)}")
    if entries[tables[0]].file_size > 64 * MEBIBYTE:
        raise ValueError("its table of tensors is longer than 64 MiB")
    root = tables[0].removesuffix("data.pkl")
    if f"{root}byteorder" in entries and archive.read(f"{root}byteorder").strip() != b"little":
        raise ValueError("it is not little-endian")
    loaded = {}

    def storage(key, kind, count):
        if (key, kind) not in loaded:
            name = f"{root}data/{key}"
            if name not in entries:
                raise pickle.UnpicklingError(f"storage {key} is missing")
            raw = archive.read(name)
            if kind == "bfloat16":
                loaded[key, kind] = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
            else:
                loaded[key, kind] = np.frombuffer(raw, kind)
        if loaded[key, kind].size != count:
            raise pickle.UnpicklingError(f"storage {key} has {loaded[key, kind].size} numbers instead of {count}")
        return loaded[key, kind]

    with archive.open(tables[0]) as file:
        table = _Restricted(file, storage).load()
    if not isinstance(table, dict):
        raise ValueError(f"it must hold a dict of tensors, got {type(table).__name__}")
    bad = [name for name, a in table.items() if not isinstance(name, str) or not isinstance(a, np.ndarray)]
    if bad:
        raise ValueError(f"it holds things that are not tensors, first {bad[0]!r}")
    return dict(table)
