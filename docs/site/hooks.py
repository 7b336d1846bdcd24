"""Steps of the site's build: formulas become MathML, which browsers draw without a script or the network."""

import html
import re

import latex2mathml.converter

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def on_page_markdown(markdown: str, **_) -> str:
    """Links to files that are not pages become their text."""
    return OUTSIDE.sub(r"\1", markdown)


def on_page_content(content: str, **_) -> str:
    """Every formula as MathML; one that cannot be read stays as it was written."""
    return FORMULA.sub(_drawn, content)


def _drawn(found: re.Match) -> str:
    source = html.unescape(found[3])
    try:
        drawn = latex2mathml.converter.convert(source, display="block" if found[2] == "[" else "inline")
    except Exception:  # whatever the converter makes of a formula it does not know
        return f"<code>{html.escape(source)}</code>"
    return f"<div>{drawn}</div>" if found[1] == "div" else drawn
