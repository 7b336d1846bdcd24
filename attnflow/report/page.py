"""The page around the pictures. Everything embedded is escaped; scripts and styles are named by their hash in its policy."""

import base64
import hashlib
import html
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

VIEW = """
<div class="view"><div><canvas id="stage" aria-label="tokens"></canvas><p class="note" id="spaces"></p>
<div class="controls"><select id="flow" aria-label="flow">{options}</select>
<button id="play" type="button" aria-pressed="false">Play</button>
<input id="time" type="range" min="0" max="0" value="0" step="1" aria-label="time"><span id="now"></span>
<label>frames/s <input id="pace" type="number" min="1" max="60" value="20"></label></div>
<p class="note" id="note"></p></div><div id="series"></div></div>"""

DIAGRAM = """
<div class="view"><div><canvas id="stage" tabindex="0" aria-label="phase diagram"></canvas><p class="note" id="hover"></p>
<div class="controls"><select id="choice" aria-label="what is shown"></select></div>
<p id="picked"></p><p><a id="open" hidden>Open the trajectory of this cell</a></p>
<p class="note">Compute a trajectory of this cell and open it here:</p><pre id="command"></pre></div><div id="series"></div></div>"""


class Page(NamedTuple):
    """What every page shows beside its picture: facts, tables and a figure."""

    facts: dict
    tables: list[tuple[str, list[dict]]]
    figure: str | None

    def write(self, kind: str, data: Mapping[str, Any]) -> str:
        """The whole HTML text; `kind` is "flows", "diagram" or "plain"."""
        options = "".join(
            f'<option value="{k}">{html.escape(flow["label"])}</option>' for k, flow in enumerate(data.get("flows", []))
        )
        picture = {"flows": VIEW.format(options=options), "diagram": DIAGRAM, "plain": ""}[kind]
        script = {"flows": "viewer.js", "diagram": "diagram.js"}.get(kind)
        code = "" if script is None else _asset("common.js") + _asset(script).replace('"use strict";\n', "")
        body = [f"<h1>{html.escape(self.facts['title'])}</h1>", picture]
        for name, rows in self.tables:
            body += [f"<h2>{html.escape(name)}</h2>", _table(rows)]
        if self.figure:
            body += ["<h2>Figure</h2>", f'<img alt="figure" src="data:image/svg+xml;base64,{self.figure}">']
        if self.facts["config"]:
            body += ["<h2>Configuration</h2>", f"<pre>{html.escape(self.facts['config'])}</pre>"]
        if self.facts["versions"]:
            body += ["<h2>Versions and device</h2>", _table([self.facts["versions"]])]
        return dress(self.facts["title"], kind, "\n".join(body), code, data)


def dress(title: str, kind: str, body: str, code: str, data: Mapping[str, Any]) -> str:
    """A document whose policy allows its own script and style, images in the page, and no request at all."""
    style = _asset("page.css")
    policy = (
        f"default-src 'none'; script-src 'sha256-{_hash(code)}'; style-src 'sha256-{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    # < is escaped, so that no value can end the element it stands in
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        embedded = embedded.replace(sign, f"\\u{ord(sign):04x}")
    script = f'<script type="application/json" id="data">{embedded}</script>\n<script>{code}</script>' if code else ""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,"><title>{html.escape(title)}</title>
<style>{style}</style></head><body class="{kind}">
{body}
{script}
</body></html>
"""


def facts_of(folder: Path) -> dict:
    """Title, configuration text, versions and device of a run folder."""
    text = _text(folder / "config.toml")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        table = {}
    study = table.get("study")
    title = table.get("title") or (study.get("title") if isinstance(study, dict) else None) or folder.resolve().name
    facts = _json(folder / "facts.json") or _json(folder / "report.json").get("facts") or {}
    if not facts:
        facts = next((f["facts"] for s in (folder / "store", folder) if "facts" in (f := _json(s / "spec.json"))), {})
    shown = {k: v for k, v in facts.items() if k != "versions"} | facts.get("versions", {})
    return {"title": str(title), "config": text, "versions": shown}


def tables_of(folder: Path) -> list[tuple[str, list[dict]]]:
    """Results and acceptance lines, where the folder has them."""
    found = _json(folder / "results.json") or _json(folder / "report.json").get("rows") or []
    parts = found if isinstance(found, dict) else {"rows": found}
    names = {"rows": "Results", "acceptance": "Acceptance lines"}
    return [(name, parts[key]) for key, name in names.items() if isinstance(parts.get(key), list) and parts[key]]


def figure_of(folder: Path) -> str | None:
    """The folder's figure in base64."""
    path = folder / "figure.svg"
    return base64.b64encode(path.read_bytes()).decode() if path.exists() else None


def _table(rows: Sequence[Any]) -> str:
    rows = [row if isinstance(row, dict) else {"value": row} for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in names)
    lines = ["".join(f"<td>{html.escape(_cell(row.get(name)))}</td>" for name in names) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "-"
    return "" if value is None else str(value)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path) or "{}")
    except ValueError:
        return {}


def _asset(name: str) -> str:
    return resources.files("attnflow.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
