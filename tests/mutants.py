"""Break the core on purpose, one line at a time, and see that the suite notices: `python tests/mutants.py [NAME ...]`.

Each mutant is a copy of the package with one text replaced, and the tests that must fail there. A mutant that lives, or
whose text no longer occurs exactly once, makes the exit code 1.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    """What is broken: the file, its text, what stands there instead, and the tests that must notice."""

    name: str
    file: str
    text: str
    instead: str
    tests: list[str]


MUTANTS = [Mutant(**each) for each in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["mutant"]]


def main() -> int:
    wanted = [m for m in MUTANTS if not sys.argv[1:] or m.name in sys.argv[1:]]
    every = sorted({test for mutant in wanted for test in mutant.tests})
    if verdict(every, None) != 0:
        print("the tests fail without any mutant: nothing can be said")
        return 1
    alive = []
    for mutant in wanted:
        start = time.perf_counter()
        code = verdict(mutant.tests, mutant)
        print(f"{OUTCOMES.get(code, 'BROKEN'):<7} {mutant.name} ({time.perf_counter() - start:.0f} s)", flush=True)
        if code != 1:
            alive.append(mutant.name)
    print(f"{len(wanted)} mutants, {len(alive)} alive")
    return 1 if alive else 0


OUTCOMES = {0: "ALIVE", 1: "killed"}


def applied(mutant: Mutant) -> str:
    """The file with its fault; ValueError unless the text is there exactly once."""
    source = (ROOT / "attnflow" / mutant.file).read_text(encoding="utf-8")
    if source.count(mutant.text) != 1:
        raise ValueError(f"{mutant.name}: its text occurs {source.count(mutant.text)} times in {mutant.file}.")
    return source.replace(mutant.text, mutant.instead)


def verdict(tests: list[str], mutant: Mutant | None) -> int:
    """Pytest's exit code (0 passed, 1 failed) on a copy of the package with the fault."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        for part in ("attnflow", "tests", "configs", "docs", "benchmarks"):
            shutil.copytree(ROOT / part, here / part, ignore=shutil.ignore_patterns("__pycache__", ".hypothesis"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, here / name)
        if mutant is not None:
            (here / "attnflow" / mutant.file).write_text(applied(mutant), encoding="utf-8")
        files = [f"tests/{name}" for name in tests]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", *files]
        done = subprocess.run(
            command, cwd=here, env=os.environ | {"PYTHONPATH": folder}, capture_output=True, text=True
        )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
