"""Arrays and heads in files: .npy, .npz and .safetensors in, .safetensors out. Nothing is ever unpickled."""

import contextlib
import dataclasses
import json
import math
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from .constrained import FixedNormHeads, GappedHeads, OrthogonalHeads, SemidefiniteHeads
from .heads import AbstractHeads, AlignedHeads, FactoredHeads, Heads, ScalarHeads

FAMILIES = {
    cls.__name__: cls
    for cls in (
        Heads, AlignedHeads, ScalarHeads, FactoredHeads, SemidefiniteHeads, OrthogonalHeads, GappedHeads, FixedNormHeads
    )
}  # fmt: skip
LARGEST = 2**33  # bytes of one array that `load_array` agrees to read
FORMAT = "attnflow heads 1"


def save_heads(path: str | Path, heads: AbstractHeads, *, facts: Mapping | None = None) -> None:
    """Write heads to a .safetensors file: their arrays by field name, the class and `facts` (JSON) as metadata.

    The file appears whole or not at all.
    """
    path = _suffixed(path, (".safetensors",))
    arrays, classes = _taken_apart(heads)
    metadata = {"format": FORMAT, "classes": json.dumps(classes), "facts": json.dumps(dict(facts or {}))}
    publish(path, safetensors.numpy.save(arrays, metadata))


def load_heads(path: str | Path) -> AbstractHeads:
    """Heads of the class they were saved with, in their dtype; a file without that metadata needs `score` and `value`, or `raw`."""
    path = _suffixed(path, (".safetensors",))
    with _whole(path):
        with safetensors.safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, array in arrays.items():
            _check_numbers(path, name, array)
        if metadata.get("format") == FORMAT:
            return _put_together(path, "", json.loads(metadata["classes"]), arrays)
    if set(arrays) == {"score", "value"}:
        return Heads(arrays["score"], arrays["value"])
    if set(arrays) == {"raw"}:
        return AlignedHeads(arrays["raw"])
    raise ValueError(f"{path} holds {sorted(arrays)}; heads need the arrays `score` and `value` (H, d, d), or `raw`.")


def load_array(path: str | Path, name: str | None = None, *, largest: int = LARGEST) -> np.ndarray:
    """One real array of a .npy, .npz or .safetensors file; `name` says which where there are several.

    **Errors:** ValueError for another suffix, a missing name, more than `largest` bytes, numbers that are not real or not
    finite, pickled objects, a damaged file.
    """
    path = _suffixed(path, (".npy", ".npz", ".safetensors"))
    if path.suffix == ".npy":
        if name is not None:
            raise ValueError(f"{path} holds a single array without a name; leave `name` out.")
        with _whole(path):
            array = _npy(path, largest)
    elif path.suffix == ".npz":
        with _whole(path):
            array = _npz(path, name, largest)
    else:
        with _whole(path), safetensors.safe_open(path, framework="numpy") as file:
            found = _named(path, name, list(file.keys()))
            size = _bytes(file.get_slice(found).get_shape(), 8)
            _check_size(path, size, largest)
            array = file.get_tensor(found)
    _check_numbers(path, name or "the array", array)
    return array


def publish(path: Path, data: bytes) -> None:
    """Let a file appear whole and durable, in place of any that is there."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".temporary", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _whole(path):
    """A damaged file is a ValueError, whatever its decoder raises; a file that is missing or closed to us stays an OSError."""
    try:
        yield
    except (ValueError, MemoryError, FileNotFoundError, PermissionError, IsADirectoryError):
        raise
    except Exception as problem:
        raise ValueError(f"{path} is damaged: {problem or type(problem).__name__}.") from None


def _taken_apart(module, at=""):
    """Arrays by dotted field name, and the class name at every dot."""
    if type(module).__name__ not in FAMILIES or FAMILIES[type(module).__name__] is not type(module):
        raise ValueError(
            f"`heads` must be of a family of this package, got `{type(module).__name__}`; save `heads.dense(d)`."
        )
    arrays, classes = {}, {at: type(module).__name__}
    for field in dataclasses.fields(module):
        value, name = getattr(module, field.name), f"{at}.{field.name}".lstrip(".")
        if isinstance(value, AbstractHeads):
            inner = _taken_apart(value, name)
            arrays |= inner[0]
            classes |= inner[1]
        else:
            arrays[name] = np.array(value, order="C")
    return arrays, classes


def _put_together(path, at, classes, arrays):
    family = FAMILIES.get(classes.get(at))
    if family is None:
        raise ValueError(f"{path} holds heads of class {classes.get(at)!r}, which this version does not know.")
    values = []
    for field in dataclasses.fields(family):
        name = f"{at}.{field.name}".lstrip(".")
        if name not in classes and name not in arrays:
            raise ValueError(f"{path} lacks the array `{name}` of `{family.__name__}`.")
        inside = name in classes
        values.append(_put_together(path, name, classes, arrays) if inside else jnp.asarray(arrays[name]))
    return family(*values)


def _npy(path, largest):
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path} is not a plain .npy array ({error}); pickled objects are never loaded.") from None
    if not isinstance(mapped, np.ndarray):
        raise ValueError(f"{path} is not a plain .npy array but an archive; name it .npz.")
    _check_size(path, mapped.nbytes, largest)
    return np.array(mapped)


def _npz(path, name, largest):
    with zipfile.ZipFile(path) as archive:
        found = _named(path, name, [member.removesuffix(".npy") for member in archive.namelist()])
        with archive.open(f"{found}.npy") as member:
            version = np.lib.format.read_magic(member)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(member)
    if dtype.hasobject:
        raise ValueError(f"{path} holds pickled objects in `{found}`; they are never loaded.")
    _check_size(path, _bytes(shape, dtype.itemsize), largest)
    with np.load(path, allow_pickle=False) as archive:
        return archive[found]


def _named(path, name, names):
    if name is None and len(names) == 1:
        return names[0]
    if name not in names:
        asked = "several arrays" if name is None else f"no array `{name}`"
        raise ValueError(f"{path} holds {asked}; choose `name` among {sorted(names)}.")
    return name


def _bytes(shape, itemsize):
    return math.prod(shape) * itemsize


def _check_size(path, size, largest):
    if size > largest:
        raise ValueError(f"{path} holds an array of {size} bytes, more than the {largest} allowed by `largest`.")


def _check_numbers(path, name, array):
    if array.dtype.kind not in "fiu":
        raise ValueError(f"{path}: {name} must hold real numbers, got {array.dtype}.")
    if not np.isfinite(array).all():
        raise ValueError(f"{path}: {name} must be finite; it holds NaN or infinity.")


def _suffixed(path, suffixes):
    path = Path(path)
    if path.suffix not in suffixes:
        raise ValueError(f"{path} must end in {' or '.join(suffixes)}.")
    return path
