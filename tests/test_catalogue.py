"""Every entry of the fault catalogue gives the right answer or a clear error."""

import pytest
from catalogue import CATALOGUE


@pytest.mark.parametrize("fault", CATALOGUE, ids=lambda f: f.input)
def test_fault_gives_what_the_catalogue_says(fault):
    fault.check()
