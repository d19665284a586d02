"""The planted defects (tests/plants.py) stay applicable: what each replaces is in its file exactly once."""

from __future__ import annotations

import pytest

from tests.plants import PLANTS, ROOT, Plant


@pytest.mark.parametrize("one", PLANTS, ids=lambda one: one.name)
def test_a_planted_defect_applies_to_the_code_as_it_is(one: Plant) -> None:
    assert (ROOT / one.file).read_text().count(one.old) == 1
    for path in (word.partition("::")[0] for word in one.tests.split()):
        assert (ROOT / path).exists()
