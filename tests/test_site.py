"""The documentation site leaves no page out, and states what it is."""

import importlib
import re
from pathlib import Path

import attnflow

DOCS = Path(__file__).parents[1] / "docs"


def test_every_page_is_in_the_navigation():
    navigation = set(re.findall(r": (\S+\.md)$", (DOCS / "site" / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    assert {page.name for page in DOCS.glob("*.md")} <= navigation


def test_every_picture_of_a_page_exists():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} shows {target}"


def test_modules_of_the_reference_exist():
    for name in re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), name


def test_citation_names_the_version():
    assert f"\nversion: {attnflow.__version__}\n" in (DOCS / "CITATION.cff").read_text(encoding="utf-8")
