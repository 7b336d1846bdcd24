"""Damaged and hostile files for every reader: a documented error or an answer, nothing run, nothing written.

`python tests/fuzz.py --cases 100000 [--seed N] [--only READER]` keeps what it finds in tests/corpus, which the tests replay.
"""

import argparse
import hashlib
import json
import random
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import checkpoints as models
import jax
import numpy as np
from safetensors.numpy import save_file

from attnflow import config, store, studies
from attnflow.checkpoints import Checkpoints
from attnflow.files import load_array, load_heads, save_heads
from attnflow.heads import AlignedHeads, FactoredHeads, Heads, ScalarHeads
from attnflow.pretrained import load
from attnflow.schema import to_table, to_toml

CORPUS = Path(__file__).parent / "corpus"
CONFIGS = Path(__file__).parents[1] / "configs"
NASTY_TEXT = [
    "nan", "inf", "-inf", "-1", "0", "1e400", "99999999999999999999", "true", '""', "[]", "[[]]", "{}", "[1, 'a']", '"none"',
    '"../../etc/passwd"', "1979-05-27", "07:32:00", '"\\u0000"', "'''a\nb'''", "{kind = 1}", "{kind = []}", "[{}]", "\ud7ff",
    "[tokens]", "[[tokens]]", "[heads]\nkind = \"scalar\"", "a.b.c = 1", "\x00", "\x7f", "null", "[study]", "[" * 300,
]  # fmt: skip
NASTY_BYTES = [
    b"", b"\x00", b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"(9999999999, 9999999999)", b"|O", b"|V8", b"<M8", b"<U9", b"-1", b"null", b"[]",
    b"{}", b"NaN", b'"F16"', b'"BF16"', b'"F8_E4M3"', b'"U64"', b"1e999", b"cposix\nsystem\n(S'true'\ntR.", b"../../x", b"[" * 5000,
    b"\xed\xa0\x80", b"9" * 5000, b'"Heads"', b"True", b"__import__('os')", b"0",
]  # fmt: skip


class Reader(NamedTuple):
    """A way in: seed folders of files by name, what reads them, and the errors that it documents."""

    seeds: Callable[[Path], None]
    read: Callable[[Path], object]
    errors: tuple[type[BaseException], ...] = (ValueError,)


def configs(folder):
    for path in sorted(CONFIGS.glob("*.toml")):
        (folder / path.stem).mkdir()
        (folder / path.stem / "a.toml").write_bytes(path.read_bytes())


def read_config(folder):
    """A configuration that is accepted also comes back from its own TOML."""
    path = folder / "a.toml"
    is_study = "study" in config.read_table(path)
    found = (studies if is_study else config).read(path)
    table = {"study": to_table(found)} if is_study else to_table(found)
    if tomllib.loads(to_toml(table)) != json.loads(json.dumps(table)):
        raise AssertionError("the configuration does not come back from its TOML")


def arrays(folder):
    rng = np.random.default_rng(0)
    for number, a in enumerate([rng.normal(size=(3, 2)), np.arange(4), np.float32(rng.normal(size=(2, 2, 2)))]):
        for ending in ("npy", "npz", "safetensors"):
            at = folder / f"{ending}{number}"
            at.mkdir()
            if ending == "npy":
                np.save(at / "a.npy", a)
            elif ending == "npz":
                (np.savez if number else np.savez_compressed)(at / "a.npz", a=a)
            else:
                save_file({"a": a}, at / "a.safetensors")


def read_array(folder):
    (path,) = folder.iterdir()
    a = load_array(path, largest=2**24)
    if not np.isfinite(a).all():
        raise AssertionError("an array that is not finite came through")


def heads(folder):
    rng = np.random.default_rng(0)
    b = rng.normal(size=(2, 3, 3))
    families = [Heads(b, b), AlignedHeads(b + b.mT), ScalarHeads([1.0, 2.0]), FactoredHeads(b, b, b, b)]
    for number, family in enumerate(families):
        (folder / str(number)).mkdir()
        save_heads(folder / str(number) / "a.safetensors", family, facts={"loss": 0.5})


def read_heads(folder):
    load_heads(folder / "a.safetensors")


STORED = np.arange(4.0).reshape(2, 2)
TREE = [np.arange(6.0), np.int64(3)]


def saved(folder):
    (folder / "one").mkdir()
    at = Checkpoints(folder / "one", {"field": "abc"})
    at.save(1, TREE)
    at.save(2, TREE)


def read_saved(folder):
    """Damage is passed over: what comes back is what was saved."""
    found = Checkpoints(folder, {"field": "abc"}).newest(TREE)
    if not all(np.array_equal(a, b) for a, b in zip(found, TREE, strict=True)):
        raise AssertionError("other arrays than those saved came back")


def stores(folder):
    at = folder / "one"
    spec = {"chunk": 2, "chunks": 1, "variables": {"a": {"shape": [2], "dtype": "float64"}}, "facts": {}}
    at.mkdir()
    with store.lock(at):
        store.open_store(at, spec).put(0, {"a": STORED})


def read_store(folder):
    """A chunk whose bytes changed is never handed out."""
    found = store.load_store(folder)
    for chunk in range(min(found.spec["chunks"], 2)):
        values = found.get(chunk)
        if values is not None and any(a.tobytes() != STORED.tobytes() for a in values.values()):
            raise AssertionError("other bytes than those stored were handed out")


def networks(folder):
    for name in ("bert", "albert", "gpt2", "llama"):
        if name in models.CONFIGS:
            settings = models.CONFIGS[name]
            tensors = models.random_tensors(settings)
            models.write_folder(folder / name, settings, tensors)
            at = folder / f"{name}-bin"
            at.mkdir()
            (at / "config.json").write_text(json.dumps(settings))
            models.write_bin(at / "pytorch_model.bin", tensors)


def read_network(folder):
    load(folder)


READERS = {
    "config": Reader(configs, read_config, (config.ConfigError,)),
    "array": Reader(arrays, read_array),
    "heads": Reader(heads, read_heads),
    "checkpoint": Reader(saved, read_saved),
    "store": Reader(stores, read_store, (ValueError, FileNotFoundError)),
    "network": Reader(networks, read_network),
}
SHARES = {"config": 8, "array": 6, "heads": 3, "checkpoint": 2, "store": 1, "network": 2}
HEAD = 2048  # most damage goes where formats keep their structure


def damaged(data: bytes, rng: random.Random, text: bool) -> bytes:
    """One to four changes: bytes set, cut out, doubled or replaced by what formats fear."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        span = min(len(data), HEAD) if rng.random() < 0.7 else len(data)
        at = rng.randrange(span + 1)
        if rng.random() < 0.2:
            at = max(0, len(data) - rng.randrange(1, 300))
        to = min(len(data), at + rng.choice((0, 1, 1, 2, 8, 40)))
        match rng.randrange(6):
            case 0:
                data[at:to] = rng.randbytes(to - at)
            case 1:
                del data[at:to]
            case 2:
                data[at:at] = data[at:to] * rng.choice((1, 2, 50))
            case 3:
                del data[at:]
            case 4 if text:
                lines = data.split(b"\n")
                line = rng.randrange(len(lines))
                key, sign, _ = lines[line].partition(b"=")
                nasty = rng.choice(NASTY_TEXT).encode("utf-8")
                lines[line] = key + sign + nasty if sign else nasty
                data = bytearray(b"\n".join(lines))
            case _:
                data[at:to] = rng.choice(NASTY_BYTES)
    return bytes(data)


def seeds(name: str) -> list[dict[str, bytes]]:
    """The files of every seed folder, by relative path."""
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        READERS[name].seeds(home)
        return [
            {str(p.relative_to(one)): p.read_bytes() for p in sorted(one.rglob("*")) if p.is_file()}
            for one in sorted(home.iterdir())
        ]


def case(files: dict[str, bytes], rng: random.Random) -> dict[str, bytes]:
    """A seed with one file, sometimes two, damaged or gone."""
    files = dict(files)
    for path in rng.sample(sorted(files), k=min(len(files), rng.choice((1, 1, 1, 2)))):
        if len(files) > 1 and rng.random() < 0.03:
            del files[path]
        else:
            files[path] = damaged(files[path], rng, path.endswith((".toml", ".json")))
    return files


class Watch:
    """What a reader does besides reading: files opened to write, names removed, processes, sockets, classes unpickled."""

    EVENTS = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")
    NEVER = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "pickle.find_class")

    def __init__(self):
        self.on, self.seen = False, []
        sys.addaudithook(self.heard)

    def heard(self, event, args):
        if not self.on:
            return
        if event in self.NEVER or event in self.EVENTS:
            self.seen.append(f"{event} {args!r:.200}")
        elif event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
            self.seen.append(f"open to write {args!r:.200}")
        elif event == "exec" and args[0].co_filename == "<string>" and not makes_classes(sys._getframe(1)):
            self.seen.append(f"exec {args!r:.200}")


def makes_classes(frame) -> bool:
    """Whether a library runs code of its own: the making of a class or of a type check, when it is first needed."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in (
        "collections",
        "dataclasses",
        "beartype",
        "jaxtyping",
    )


def verdict(name: str, folder: Path, watch: Watch) -> str | None:
    """None where the reader answered or raised what it documents, and did nothing else; otherwise what happened."""
    reader = READERS[name]
    watch.seen.clear()
    problem = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch.on = True
        try:
            reader.read(folder)
        except reader.errors:
            pass
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)
            own = [f for f in last if "attnflow" in f.filename] or last
            problem = f"{type(error).__name__} in {Path(own[-1].filename).name}, {own[-1].name}: {error}"
        finally:
            watch.on = False
    return problem or (f"did more than read: {watch.seen[0]}" if watch.seen else None)


def place(files: dict[str, bytes], folder: Path) -> None:
    for path, data in files.items():
        at = folder / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_bytes(data)


def fuzz(name: str, cases: int, seed: int, watch: Watch) -> dict[str, dict[str, bytes]]:
    """What `cases` damaged files of one reader brought up: the first case of every kind of failure."""
    rng = random.Random(f"{name} {seed}")
    kept, findings = seeds(name), {}
    with tempfile.TemporaryDirectory() as temporary:
        for number, files in enumerate(kept):
            place(files, Path(temporary) / f"seed{number}")
            if (problem := verdict(name, Path(temporary) / f"seed{number}", watch)) is not None:
                raise RuntimeError(f"the undamaged seed {number} of {name} fails: {problem}")
        for _ in range(cases):
            folder = Path(temporary) / "case"
            files = case(rng.choice(kept), rng)
            folder.mkdir()
            place(files, folder)
            if (problem := verdict(name, folder, watch)) is not None:
                findings.setdefault(problem.partition(": ")[0], files | {"": problem.encode()})
            for path in sorted(folder.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            folder.rmdir()
    return findings


def keep(name: str, files: dict[str, bytes]) -> Path:
    """Put a finding into the corpus."""
    digest = hashlib.sha256(b"".join(p.encode() + d for p, d in sorted(files.items()) if p)).hexdigest()[:10]
    at = CORPUS / name / digest
    place({path: data for path, data in files.items() if path}, at)
    return at


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(READERS))
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    watch, total = Watch(), Counter()
    for name in [options.only] if options.only else READERS:
        share = options.cases if options.only else options.cases * SHARES[name] // sum(SHARES.values())
        start = time.perf_counter()
        findings = fuzz(name, share, options.seed, watch)
        seconds = time.perf_counter() - start
        total[name] = len(findings)
        print(
            f"{name}: {share} cases in {seconds:.0f} s ({share / seconds:.0f} per second), {len(findings)} findings",
            flush=True,
        )
        for files in findings.values():
            print("  ", files[""].decode(errors="replace")[:200], "->", keep(name, files).name, flush=True)
    return int(total.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
