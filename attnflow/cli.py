"""The command `attnflow`: one verb per job."""

import sys
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console

from .config import ConfigError, read, safe_name

Config = Annotated[Path, tyro.conf.Positional]
Assignments = Annotated[tuple[str, ...], tyro.conf.arg(name="set", metavar="KEY=VALUE"), tyro.conf.UseAppendAction]

app = tyro.extras.SubcommandApp()


@app.command
def run(config: Config, /, assign: Assignments = (), out: Path | None = None) -> None:
    """Solve the flows of a TOML file, print a table and write a run folder.

    Examples: attnflow run configs/low_temperature.toml
              attnflow run configs/low_temperature.toml --set attention.beta=[8] --out runs/mine
    """
    from .run import run as solve_all
    from .run import table

    experiment = read(config, assign)
    _precision(experiment.dtype)
    folder = Path("runs") / safe_name(config.stem) if out is None else out
    console = Console()
    rows = solve_all(experiment, folder, say=console.print)
    console.print(table(experiment.title, rows))
    console.print(f"written to {folder}/")


def _precision(dtype: str) -> None:
    """The command line may set what a library must not: double precision, and a cache for compiled programs."""
    jax.config.update("jax_enable_x64", dtype == "float64")
    cache = Path.home() / ".cache" / "attnflow" / "programs"
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 the run failed, 2 bad arguments or configuration, 130 interrupted."""
    try:
        app.cli(prog="attnflow", description=__doc__)
    except ConfigError as error:
        print(f"attnflow: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (RuntimeError, ValueError, OSError) as error:
        print(f"attnflow: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print("attnflow: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
