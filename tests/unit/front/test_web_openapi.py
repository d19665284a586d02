"""The answers that the description of the HTTP API promises."""

from __future__ import annotations

import pytest

from berth.web.openapi import _of_hosts


@pytest.mark.parametrize("operation", ["stop_drain", "pause_drain", "resume_drain", "start_drain", "decide_about_host"])
def test_a_decision_that_the_state_does_not_allow_is_a_documented_conflict(operation: str) -> None:
    """Schemathesis received a 409 of a DELETE that documented none."""
    assert 409 in _of_hosts()[operation].errors
