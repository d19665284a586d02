"""The pages' computations on schedulers' answers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from berth.web.access import WebCaller, WebRole
from berth.web.api import WebApi, as_seen
from berth.web.pages import lost_claims, state_of, troubles_of_hosts
from bus.contracts.build import BuildPage, BuildQuery, BuildRecord, BuildState, HostRecord, TimelineEntry
from bus.contracts.placement import ClaimHolder
from bus.faults import RequestRefused

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


class EarlierScheduler:
    """A bus whose schedulers are of the version before `before_instance`."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.queries: list[BuildQuery] = []

    async def request(self, query: BuildQuery, _reply: type[BuildPage], **_: Any) -> BuildPage:
        self.queries.append(query)
        if query.before_instance is not None:
            raise RequestRefused("Object contains unknown field `before_instance`", code=self.code)
        return BuildPage(builds=(BUILD,))


async def test_a_scheduler_of_an_earlier_version_receives_the_query_that_it_knows() -> None:
    """The second page of builds was refused with 422 until all schedulers were upgraded."""
    query = BuildQuery(before=2.0, before_instance=MINE, limit=1)
    earlier = EarlierScheduler("message.invalid")
    page = await WebApi(earlier, None, random.Random(1)).builds(query)  # type: ignore[arg-type]
    assert page.builds == (BUILD,) and earlier.queries == [query, BuildQuery(before=2.0, limit=1)]
    busy = EarlierScheduler("database.unavailable")
    with pytest.raises(RequestRefused):
        await WebApi(busy, None, random.Random(1)).builds(query)  # type: ignore[arg-type]
    assert busy.queries == [query]
