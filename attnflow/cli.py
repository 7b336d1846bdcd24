"""The command `attnflow`: one verb per job."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import jax
import tyro
from rich.console import Console

from .config import ConfigError, read, safe_name

Config = Annotated[Path, tyro.conf.Positional]
Assignments = Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="KEY=VALUE"), tyro.conf.UseAppendAction]

DESCRIPTION = """The simulator of attention dynamics: one verb per job.

$ attnflow init mine.toml          a commented configuration to start from
$ attnflow run mine.toml           its flows: table, arrays, figure in runs/mine
$ attnflow report runs/mine        one HTML page to look at them
$ attnflow COMMAND --help          examples of each

Exit codes: 0 done, 1 the run failed, 2 bad arguments or configuration, 3 a result is not what theory says, 130 interrupted.
Completion: attnflow --tyro-print-completion bash (or zsh, fish)."""

MAPPED = (
    "symmetry_defect",
    "alignment",
    "gap",
    "beta_op",
    "stable_rank",
    "negative_share",
    "entropy",
    "condition8",
    "exact",
)
"""What `inspect --figure` shows of every head."""

app = tyro.extras.SubcommandApp()


@app.command
def run(config: Config, /, assign: Assignments = (), out: Path | None = None) -> None:
    """Solve the flows of a TOML file, print a table and write a run folder.

    $ attnflow run configs/low_temperature.toml
    $ attnflow run configs/low_temperature.toml --set attention.beta=[8] --out runs/mine
    """
    from .run import run as solve_all
    from .run import table

    experiment = read(config, assign)
    _precision(experiment.dtype)
    folder = Path("runs") / safe_name(config.stem) if out is None else out
    console = _console()
    rows = solve_all(experiment, folder, say=console.print)
    console.print(table(experiment.title, rows))
    _written(folder)


@app.command
def sweep(
    config: Config,
    /,
    assign: Assignments = (),
    out: Path | None = None,
    workers: int = 0,
    scheduler: str | None = None,
) -> None:
    """Sweep a study over beta, heads and seeds; a killed sweep continues with the same command.

    $ attnflow sweep configs/phase_diagram.toml
    $ attnflow sweep configs/phase_diagram.toml --set study.seeds=16 --workers 2

    Exit code 3 if an acceptance line is missed.
    """
    from .run import table
    from .studies import read, run_study

    study = read(config, assign)
    _precision("float64")
    folder = Path("runs") / safe_name(config.stem) if out is None else out
    console = _console()
    progress = sys.stderr.isatty()
    rows, lines = run_study(study, folder, workers=workers, scheduler=scheduler, progress=progress)
    console.print(table(study.title, rows))
    _accept(console, lines, folder)


@app.command
def fit(config: Config, /, assign: Assignments = (), out: Path | None = None) -> None:
    """Search heads that stay radially dominant along the flow; a killed fit continues with the same command.

    $ attnflow fit configs/radial_dominance.toml
    $ attnflow fit configs/radial_dominance.toml --set horizon=4
    """
    from .fitting import fit_from, read

    spec = read(config, assign)
    _precision("float64")
    folder = Path("runs") / safe_name(config.stem) if out is None else out
    fit_from(spec, folder, progress=sys.stderr.isatty())
    _written(folder)


@app.command
def verify(
    paper: Literal["A", "B"] | None = None,
    config: Path | None = None,
    assign: Assignments = (),
    json: Path | None = None,
) -> None:
    """Check every statement of the papers, where it should hold and where it is known to fail.

    $ attnflow verify
    $ attnflow verify --paper B --json rows.json
    $ attnflow verify --config configs/low_temperature.toml

    With --config, on that file's heads and tokens (its first beta): which hypotheses they meet, and by how much they miss.
    Exit code 3 if a row is unexpected.
    """
    from . import verify as checks

    field, x0 = None, None
    if config is not None:
        experiment = read(config, assign)
        _precision(experiment.dtype)
        x0, pairs = experiment.fields()
        field = pairs[0][1]
    else:
        _precision("float64")
    rows = checks.verify(paper, field, x0)
    _console().print(checks.table(rows))
    if json is not None:
        json.write_text(checks.to_json(rows) + "\n", encoding="utf-8")
    odd = checks.unexpected(rows)
    print(f"{len(rows)} rows, {len(odd)} unexpected")
    if odd:
        raise SystemExit(3)


@app.command
def figure(
    name: Annotated[str, tyro.conf.Positional], /, out: Path = Path("runs/figures"), page: Path | None = None
) -> None:
    """Make a figure of the papers, or `all`, and print the numbers it must show; `list` says which there are.

    $ attnflow figure list
    $ attnflow figure kinetic
    $ attnflow figure all --out gallery --page gallery/page.md

    The page is Markdown with all figures made. Exit code 3 if an acceptance line is missed.
    """
    from .gallery import NAMES, caption, make
    from .gallery.page import write
    from .run import table

    _precision("float64")
    console = _console()
    if name == "list":
        for each in NAMES:
            print(f"{each:<22} {caption(each)}")
        return
    missed, made = 0, {}
    for each in NAMES if name == "all" else [name]:
        title, rows, lines = make(each, out / each)
        console.print(table(title, rows))
        missed += _show(console, lines, out / each)
        made[each] = title, lines
    if page is not None:
        write(page, made, out)
        print(f"written {page}")
    if missed:
        raise SystemExit(3)


@app.command
def report(
    folder: Annotated[Path, tyro.conf.Positional],
    /,
    out: Path | None = None,
    cell: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INDEX ...")] = (),
) -> None:
    """Write one HTML page of a run, sweep or fit: tokens that move, curves, tables; it opens from disk, without network.

    $ attnflow report runs/low_temperature
    $ attnflow report runs/phase_diagram --cell 12 0 0

    A cell is one point of a study, by its index along every axis: it is solved again and linked from the diagram.
    """
    from .report import report as write

    _precision("float64")
    if cell:
        from .cells import open_cell

        print(f"written {open_cell(folder, cell)}")
    print(f"written {write(folder, out)}")


@app.command
def inspect(
    folder: Annotated[Path, tyro.conf.Positional],
    /,
    text: Path | None = None,
    json: Path | None = None,
    figure: Path | None = None,
) -> None:
    """Diagnose the heads of a trained transformer in a local folder or file: defects, angles, verdict per theorem.

    $ attnflow inspect models/minilm
    $ attnflow inspect models/minilm --text page.txt --json heads.json --figure heads.svg
    """
    from .pretrained import inspect as diagnose

    _precision("float64")
    report = diagnose(folder, None if text is None else text.read_text(encoding="utf-8"))
    report.print()
    if json is not None:
        report.to_json(json)
    if figure is not None:
        from . import plots

        shown = [name for name in MAPPED if name in report.columns]
        plots.save(plots.layer_maps({name: report.heat(name) for name in shown}), figure)


@app.command
def doctor() -> None:
    """Print versions and device, and check this machine's compiler on sums that a faulty release gets wrong.

    $ attnflow doctor
    """
    import jax.numpy as jnp
    import numpy as np

    from .facts import facts

    _precision("float64")
    for name, value in facts().items():
        print(f"{name:<10} {value}")
    m = np.random.default_rng(0).normal(size=(3, 3))
    x = np.random.default_rng(1).normal(size=(20_000, 3))
    got = jax.jit(jax.vmap(lambda v: jnp.sum((m @ v) ** 2)))(x)
    wrong = int(np.sum(np.abs(np.asarray(got) - np.sum((x @ m.T) ** 2, axis=1)) > 1e-9))
    print(f"compiler   {'right' if wrong == 0 else f'WRONG in {wrong} of 20000 sums: use another jaxlib'}")
    if wrong:
        raise SystemExit(1)


@app.command
def init(
    path: Annotated[Path, tyro.conf.Positional] = Path("experiment.toml"),
    /,
    kind: Literal["run", "sweep", "fit"] = "run",
) -> None:
    """Write a commented configuration to start from.

    $ attnflow init mine.toml
    $ attnflow init diagram.toml --kind sweep
    $ attnflow init search.toml --kind fit
    """
    from .figures import find_configuration

    source = find_configuration({"run": "flow", "sweep": "phase_diagram", "fit": "radial_dominance"}[kind])
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(source.read_text(encoding="utf-8"))
    except FileExistsError:
        raise ConfigError(f"{path}: exists already; name another file.") from None
    print(f"written {path}; next: attnflow {kind} {path}")


def _written(folder: Path) -> None:
    print(f"written to {folder}/; look at it: attnflow report {folder}")


def _show(console: Console, lines, folder: Path) -> int:
    """Print acceptance lines and return how many are missed."""
    for line in lines:
        console.print(
            f"{'ok    ' if line.good else 'MISSED'} {line.what}: {line.found:.6g} (expected {line.expected:g})"
        )
    _written(folder)
    return sum(not line.good for line in lines)


def _accept(console: Console, lines, folder: Path) -> None:
    if _show(console, lines, folder):
        raise SystemExit(3)


def _console() -> Console:
    """The terminal's width, or a wide page where there is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 160)


def _precision(dtype: str) -> None:
    """The command line may set what a library must not: the precision."""
    jax.config.update("jax_enable_x64", dtype == "float64")


def main() -> None:
    """Entry point."""
    try:
        app.cli(prog="attnflow", description=DESCRIPTION)
    except ConfigError as error:
        print(f"attnflow: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (RuntimeError, ValueError, OSError, MemoryError) as error:
        print(f"attnflow: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt as stop:
        print("attnflow: interrupted", *getattr(stop, "__notes__", ()), sep="\n", file=sys.stderr)
        raise SystemExit(130) from None
