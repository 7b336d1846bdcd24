"""Every entry of the fault catalogue gives the right answer or a clear error; the mutants still fit the code."""

from pathlib import Path

import mutants
import pytest
from catalogue import CATALOGUE, INJECTED, PAGE, written


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda f: f.input)
def test_fault_gives_what_the_catalogue_says(fault):
    fault.check()


def test_every_mutant_changes_one_place():
    assert len({m.name for m in mutants.MUTANTS}) == len(mutants.MUTANTS) >= 30
    for mutant in mutants.MUTANTS:
        assert mutant.text != mutant.instead and mutants.applied(mutant)


@pytest.mark.slow
def test_a_mutant_is_noticed():
    mutant = mutants.MUTANTS[0]
    assert mutants.verdict(mutant.tests, None) == 0
    assert mutants.verdict(mutant.tests, mutant) == 1


def test_the_page_shows_the_catalogue_as_it_is():
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run `python tests/catalogue.py` to bring docs/reliability.md up to date"


@pytest.mark.parametrize("injected", INJECTED, ids=lambda f: f.fault)
def test_injected_faults_name_tests_that_exist(injected):
    file, name = injected.test.split("::")
    assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")
