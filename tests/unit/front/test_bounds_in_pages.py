"""How the page of messages prints the bounds of a field."""

from __future__ import annotations

import pytest

from lab.reference.messages import _type


@pytest.mark.parametrize(("bound", "printed"), [(0, "0"), (0.0, "0"), (3600.0, "3600"), (0.5, "0.5")])
def test_an_integral_bound_is_printed_alike_whichever_module_was_imported_first(bound: float, printed: str) -> None:
    assert _type({"type": "number", "exclusiveMinimum": bound}) == f"number (> {printed})"
