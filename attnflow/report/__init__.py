"""One self-contained HTML page per run folder or sweep store: it opens from disk and asks the network for nothing."""

from pathlib import Path

from .diagram import diagram
from .flows import flows
from .page import Page, dress, facts_of, figure_of, tables_of


def report(folder: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of `folder` and return its path, by default `folder/report.html`.

    `folder` is what `attnflow run`, `sweep` or `fit` wrote, or the store of a sweep of one's own. Flows become tokens on the
    sphere with a time slider and curves that follow it, sweeps a phase diagram whose cells show their values.

    **Errors:** FileNotFoundError where there is nothing to show.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no run folder {folder}.")
    out = folder / "report.html" if out is None else Path(out)
    store = next((s for s in (folder, folder / "store") if (s / "spec.json").exists()), None)
    moving = [] if store else flows(folder)
    if not (store or moving or figure_of(folder) or tables_of(folder)):
        raise FileNotFoundError(f"{folder} holds no flows, no store and no results: was it written by attnflow?")
    page = Page(facts_of(folder), tables_of(folder), figure_of(folder))
    if store is not None:
        html = page.write("diagram", diagram(folder, store, out.parent))
    elif moving:
        html = page.write("flows", {"flows": moving})
    else:
        html = page.write("plain", {})
    out.write_text(html, encoding="utf-8")
    return out


__all__ = ["dress", "report"]
