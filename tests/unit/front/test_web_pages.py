"""The pages' computations on schedulers' answers."""

from __future__ import annotations

import pytest

from berth.web.access import WebCaller, WebRole
from berth.web.api import as_seen
from berth.web.pages import lost_claims
from bus.contracts.build import BuildRecord, BuildState, TimelineEntry
from bus.contracts.placement import ClaimHolder

MINE, THEIRS = ("10000000-0000-4000-8000-000000000001", "20000000-0000-4000-8000-000000000002")
LOST = TimelineEntry(
    at=1.0,
    who="scheduler s",
    what="not_claimed",
    detail="rack: h1: full",
    holders=(ClaimHolder(consumer=THEIRS, project_id="theirs"), ClaimHolder(consumer=MINE, project_id="mine")),
)
BUILD = BuildRecord(
    instance_uuid="30000000-0000-4000-8000-000000000003",
    project_id="mine",
    flavor="m1.tiny",
    state=BuildState.ACTIVE,
    timeline=(LOST, TimelineEntry(at=2.0, who="scheduler s", what="claimed")),
)


def test_a_lost_claim_is_shown_with_those_that_hold_what_was_lost() -> None:
    (shown,) = lost_claims(BUILD)
    assert (shown.at, shown.host, shown.outcome, shown.holders) == (1.0, "rack: h1", "full", (THEIRS, MINE))


@pytest.mark.parametrize(
    ("role", "shown"),
    [(WebRole.PROJECT, [MINE]), (WebRole.READER, [THEIRS, MINE]), (WebRole.OPERATOR, [THEIRS, MINE])],
)
def test_a_project_learns_only_of_its_own_instances_that_were_faster(role: WebRole, shown: list[str]) -> None:
    seen = as_seen(BUILD, WebCaller(name="c", role=role, project="mine"))
    assert [one.consumer for one in seen.timeline[0].holders] == shown
    assert (seen.timeline[0].detail, seen.timeline[1]) == (LOST.detail, BUILD.timeline[1])
