"""What the placer is asked for, apart from the calls of `test_select`."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from nova_scheduler.config import NovaConfig
from nova_scheduler.decide.placer_requests import OWNER_TRAIT, PlacerRequests, claim_owner_of
from nova_scheduler.request.request_spec import parse_request_spec
from nova_scheduler.wire.envelope import Call
from scheduler_worker.selection.host_view import HostsView
from scheduler_worker.selection.request_spec import RequestSpec
from tests.unit.nova_scheduler.world import PLENTY, Cloud, request_spec


@pytest.mark.parametrize("unique", ["", "x" * 65, "a/b"])
def test_a_run_always_has_a_name(unique: str) -> None:
    name = claim_owner_of(Call(method="m", unique_id=unique, message_id="1"))
    assert len(name) == 32 and name == claim_owner_of(Call(method="m", unique_id=unique, message_id="1"))
    assert name != claim_owner_of(Call(method="m", unique_id=unique, message_id="2"))


@pytest.mark.parametrize(("release", "is_required"), [(29, False), (33, False), (34, True)])
async def test_the_owner_is_required_of_releases_that_require_it(
    release: Literal[29, 33, 34], is_required: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = await Cloud([PLENTY], nova=NovaConfig(release=release)).open()
    monkeypatch.setattr(HostsView, "has_trait", lambda view, _: np.ones(len(view), dtype=np.bool_))
    spec = PlacerRequests(here.selector, here.facts, here.nova).spec(parse_request_spec(request_spec()))
    assert isinstance(spec, RequestSpec)
    assert (OWNER_TRAIT in str(spec.query)) == is_required
