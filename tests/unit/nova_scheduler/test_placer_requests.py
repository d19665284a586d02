"""What the placer is asked for, apart from the calls of `test_select`."""

from __future__ import annotations

import pytest

from nova_scheduler.decide.placer_requests import claim_owner_of
from nova_scheduler.wire.envelope import Call


@pytest.mark.parametrize("unique", ["", "x" * 65, "a/b"])
def test_a_run_always_has_a_name(unique: str) -> None:
    name = claim_owner_of(Call(method="m", unique_id=unique, message_id="1"))
    assert len(name) == 32 and name == claim_owner_of(Call(method="m", unique_id=unique, message_id="1"))
    assert name != claim_owner_of(Call(method="m", unique_id=unique, message_id="2"))
