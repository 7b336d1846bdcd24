"""Checkpoints of a long computation: a pytree of arrays per step, three kept, none ever half-written.

    FOLDER/step-00000150.safetensors   the leaves
    FOLDER/step-00000150.json          sha256 of that file and the identity of the computation; written last

A checkpoint counts if and only if its JSON parses and the bytes have its checksum, so the process may die at any moment;
a damaged one is passed over for the one before.
"""

import contextlib
import dataclasses
import hashlib
import json
import warnings
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from .files import publish
from .store import lock

KEPT = 3


@contextlib.contextmanager
def opened(folder: Path, identity: Mapping) -> Generator["Checkpoints"]:
    """The checkpoints of one computation, held as the only writer (`store.StoreBusy` where another process has them)."""
    with lock(folder):
        yield Checkpoints(folder, dict(identity))


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Checkpoints in `folder` of the computation with that `identity` (JSON)."""

    folder: Path
    identity: dict

    def save(self, step: int, tree: Any) -> None:
        """Write one checkpoint durably, then remove those that are too old."""
        leaves = [np.array(leaf, order="C") for leaf in jax.tree.leaves(tree)]
        data = safetensors.numpy.save({f"{i:05d}": leaf for i, leaf in enumerate(leaves)})
        note = {"step": step, "sha256": hashlib.sha256(data).hexdigest(), "identity": self.identity}
        stem = self.folder / f"step-{step:08d}"
        publish(stem.with_suffix(".safetensors"), data)
        publish(stem.with_suffix(".json"), json.dumps(note, sort_keys=True).encode())
        for old in sorted(self.folder.glob("step-*.json"))[:-KEPT]:
            old.unlink(missing_ok=True)
            old.with_suffix(".safetensors").unlink(missing_ok=True)

    def newest(self, like: Any) -> Any:
        """The newest intact checkpoint as a pytree like `like`, or `like` itself where there is none.

        **Errors:** ValueError where the folder holds another computation.
        """
        for path in sorted(self.folder.glob("step-*.json"), reverse=True):
            leaves = self._read(path)
            if leaves is None:
                warnings.warn(
                    f"checkpoint {path.stem} in {self.folder} is damaged; going on from the one before.", stacklevel=3
                )
                continue
            old, structure = jax.tree.flatten(like)
            if len(leaves) != len(old):
                raise ValueError(f"`checkpoint` {self.folder} holds {len(leaves)} arrays, this fit has {len(old)}.")
            typed = [
                jnp.asarray(new) if isinstance(was, jax.Array) else new for new, was in zip(leaves, old, strict=True)
            ]
            return jax.tree.unflatten(structure, typed)
        return like

    def _read(self, path):
        """Leaves of one checkpoint in order; None where it is damaged."""
        try:
            note = json.loads(path.read_bytes())
            data = path.with_suffix(".safetensors").read_bytes()
            if hashlib.sha256(data).hexdigest() != note["sha256"]:
                return None
            identity = dict(note["identity"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        if identity != self.identity:
            names = [name for name in self.identity if identity.get(name) != self.identity[name]]
            raise ValueError(
                f"`checkpoint` {self.folder} holds another fit: it differs in {', '.join(names)}. Choose another folder."
            )
        arrays = safetensors.numpy.load(data)
        return [arrays[name] for name in sorted(arrays)]


def fingerprint(tree: Any) -> str:
    """Sha256 of the structure and of every array of a pytree."""
    leaves, structure = jax.tree.flatten(tree)
    digest = hashlib.sha256(str(structure).encode())
    for leaf in leaves:
        if not isinstance(leaf, np.ndarray | jax.Array):
            continue  # functions and flags: their text would differ from process to process
        array = np.array(leaf, order="C")
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
