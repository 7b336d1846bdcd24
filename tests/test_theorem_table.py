"""docs/theorems.md is complete in both directions: every name in it exists, and nothing exists that it lacks."""

import importlib
import inspect
import re
from pathlib import Path

from attnflow import claims, theory
from attnflow.gallery import NAMES

ROOT = Path(__file__).parents[1]
COLUMNS = ("statement", "hypothesis", "closed form", "claim", "test", "config", "figure")


def rows():
    text = (ROOT / "docs" / "theorems.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert tuple(cells[0]) == COLUMNS and all(len(c) == len(COLUMNS) for c in cells)
    return [dict(zip(COLUMNS, c, strict=True)) for c in cells[1:]]


def names(column):
    return {name for row in rows() for name in re.findall(r"`([^`]+)`", row[column])}


def public(module):
    """Public functions that a module defines itself."""
    return {
        name
        for name, f in vars(module).items()
        if inspect.isfunction(f) and not name.startswith("_") and f.__module__ == module.__name__
    }


def test_every_closed_form_is_in_the_table_and_every_one_named_exists():
    inside = {name for name, m in vars(theory).items() if getattr(m, "__package__", "") == theory.__name__}
    modules = inside - {"numbers"}
    assert len(modules) == 5
    defined = {f"{m}.{f}" for m in modules for f in public(importlib.import_module(f"attnflow.theory.{m}"))}
    assert names("closed form") == defined


def test_every_claim_is_in_the_table_and_every_one_named_exists():
    defined = {name for name, f in vars(claims).items() if inspect.isfunction(f)}
    assert names("claim") == defined


def test_every_test_config_and_figure_named_exists():
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))
    assert {name for name in names("test") if f"def {name}(" not in tests} == set()
    assert {name for name in names("config") if not (ROOT / "configs" / f"{name}.toml").exists()} == set()
    assert names("figure") <= set(NAMES)


def test_every_statement_has_a_test_and_a_place_where_it_is_computed():
    for row in rows():
        assert "`" in row["test"] and ("`" in row["closed form"] or "`" in row["claim"]), row["statement"]
        assert row["statement"].strip()


def test_every_claim_names_its_source_and_hypothesis_types_exist():
    types = names("hypothesis")
    assert types <= {"AlignedHeads", "ScalarHeads"}
    for name in names("claim"):
        assert inspect.getdoc(getattr(claims, name)), name
