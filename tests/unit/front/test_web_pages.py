"""The pages' computations on schedulers' answers."""

from __future__ import annotations

import pytest

from berth.web.access import WebCaller, WebRole
from berth.web.api import as_seen
from berth.web.pages import lost_claims, state_of, troubles_of_hosts
from bus.contracts.build import BuildRecord, BuildState, HostRecord, TimelineEntry
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


def test_hosts_that_are_not_announced_differ_from_those_that_are_down() -> None:
    """A scheduler that has just started has received no announcement, and no service is silent."""
    hosts = [
        HostRecord(uuid=MINE, name="h1", cell="c1", up=True),
        HostRecord(uuid=THEIRS, name="h2", cell="c1"),
        HostRecord(uuid=THEIRS, name="h3", announced=False),
        HostRecord(uuid=THEIRS, name="h4", cell="c1", announced=False),
    ]
    assert [state_of(host) for host in hosts] == ["up", "down", "not announced", "not announced"]
    cells, troubles = troubles_of_hosts(hosts)
    assert cells == {"c1": (1, 3), "?": (0, 1)}
    assert [(one.what, one.detail) for one in troubles] == [
        ("Cell c1", "1 of 3 hosts are down: their compute services are silent"),
        ("Hosts not announced", "2 of 4: by no compute service since the scheduler's start"),
    ]
