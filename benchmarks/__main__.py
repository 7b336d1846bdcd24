"""`python -m benchmarks NAME|all|report [--tiny] [--out DIR] [--cores N] [--repeats N]`.

Each benchmark runs in a process of its own, on one core and on all of them, because the number of threads is decided
when a process starts. `fit`, which takes minutes per key (`--repeats`), is not part of `all`. Results are JSON lines in DIR
(default `benchmarks/results`), from which `report` writes report.md.
"""

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

# name -> runs on one core too
BENCHMARKS = {
    "floor": True,
    "reduction": True,
    "gradient": True,
    "memory": False,
    "solve": False,
    "compile": False,
    "harmonics": False,
    "transport": False,
    "sweep": False,
    "phase_diagram": False,
    "adjoint": False,
    "fit": False,
    "gpu": False,
}
APART = {"fit"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=[*BENCHMARKS, "all", "report"])
    parser.add_argument("--tiny", action="store_true", help="smallest sizes: keeps the scripts alive, measures nothing")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--cores", type=int, help="run in this process on so many cores (otherwise: one, then all)")
    parser.add_argument("--repeats", type=int, help="timed rounds per contest (default 7, tiny 1)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in BENCHMARKS if name not in APART] if options.name == "all" else [options.name]
    if options.name != "report":
        if options.cores is not None and options.name != "all":
            return run(options)
        for name in names:
            (options.out / f"{name}.jsonl").unlink(missing_ok=True)
            both = BENCHMARKS[name] and available() > 1 and not options.tiny
            for count in [1, available()] if both else [available()]:
                code = subprocess.run([*again(options, name), "--cores", str(count)]).returncode
                if code != 0:
                    print(f"benchmark {name} failed on {count} core(s)", file=sys.stderr)
                    return code
    from .report import write

    write(options.out)
    return 0


def run(options) -> int:
    """One benchmark in this process, on the cores asked for: before any library that counts them is imported."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    os.environ.setdefault("OMP_NUM_THREADS", str(options.cores))
    import jax

    from .measure import Recorder

    jax.config.update("jax_enable_x64", True)
    repeats = options.repeats or (1 if options.tiny else 7)
    recorder = Recorder(options.out / f"{options.name}.jsonl", repeats, options.tiny)
    importlib.import_module(f".{options.name}", __package__).main(recorder)
    return 0


def available() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def again(options, name: str) -> list[str]:
    flags = ["--tiny"] if options.tiny else []
    flags += ["--repeats", str(options.repeats)] if options.repeats else []
    return [sys.executable, "-m", "benchmarks", name, "--out", str(options.out), *flags]


if __name__ == "__main__":
    sys.exit(main())
