"""The gallery: one Markdown page of figures with the numbers each must show."""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from ..figures import Line
from . import configuration_name, description

INTRODUCTION = """\
# Gallery

Made by one command, `attnflow figure all --page docs/gallery.md`; `attnflow figure NAME` makes one of them, with its arrays. No LaTeX
is needed, and every figure is also written as vectors (`figure.svg`). Each stands with the numbers it must show: what was
found, what is expected, and whether it is met.
"""
WIDTH = 1000  # pixels of a picture on the page


def write(page: Path, made: Mapping[str, tuple[str, list[Line]]], folder: Path) -> None:
    """Write `page` and its pictures (`figures/NAME.png` beside it) from figures {name: (title, lines)} made in `folder`."""
    (page.parent / "figures").mkdir(parents=True, exist_ok=True)
    parts = [INTRODUCTION]
    for name, (title, lines) in made.items():
        with Image.open(folder / name / "figure.png") as picture:
            small = picture.convert("RGB")
            small.thumbnail((WIDTH, WIDTH))
            small.quantize(128).save(page.parent / "figures" / f"{name}.png", optimize=True)
        parts.append(f"## {title}\n\n![{title}](figures/{name}.png)\n\n{description(name)}\n")
        source = configuration_name(name)
        where = "" if source is None else f", [{source.name}]({os.path.relpath(source, page.parent)})"
        parts.append(f"`attnflow figure {name}`{where}\n")
        parts.append("| acceptance line | found | expected | |\n|---|---|---|---|")
        parts += [
            f"| {_plain(line.what)} | {_short(line.found)} | {line.expected:g} | {'ok' if line.good else '**missed**'} |"
            for line in lines
        ]
        parts.append("")
    page.write_text("\n".join(parts).rstrip() + "\n", encoding="utf-8")


def _short(value: float) -> str:
    return f"{value:.6g}" if abs(value) >= 1e-4 or value == 0 or not np.isfinite(value) else f"{value:.1e}"


def _plain(text: str) -> str:
    return text.replace("|", "\\|")
