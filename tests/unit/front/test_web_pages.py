"""What the pages compute of schedulers' answers."""

from __future__ import annotations

from typing import Any, cast

from berth.web.access import WebCaller, WebRole
from berth.web.api import WebApi
from berth.web.pages import AROUND_S, Pages
from bus.clock import SystemClock
from bus.contracts.build import BuildPage, BuildQuery, BuildRecord, BuildState, TimelineEntry

MINE, OTHER = (f"00000000-0000-4000-8000-00000000000{number}" for number in (1, 2))


def record(uuid: str, *timeline: TimelineEntry) -> BuildRecord:
    return BuildRecord(
        instance_uuid=uuid, project_id="p", flavor="m1.small", state=BuildState.ACTIVE, host="h2", timeline=timeline
    )


class Records(WebApi):
    """An API whose scheduler has these builds; the queries that it was sent."""

    def __init__(self, builds: tuple[BuildRecord, ...]) -> None:
        self.queries: list[BuildQuery] = []
        self._builds = builds

    async def builds(self, query: BuildQuery) -> BuildPage:
        self.queries.append(query)
        return BuildPage(builds=self._builds)


async def test_a_lost_claim_is_shown_with_the_builds_that_are_on_its_host() -> None:
    lost = TimelineEntry(at=100.0, who="scheduler", what="not_claimed", detail="rack: h1: full")
    mine = record(MINE, TimelineEntry(at=99.0, who="scheduler", what="requested"), lost)
    api = Records((mine, record(OTHER)))
    none = cast("Any", None)
    pages = Pages(api, none, none, none, none, queues=none, clock=SystemClock())
    (shown,) = await pages._lost_claims(mine, WebCaller("op", WebRole.OPERATOR))
    assert (shown.host, shown.outcome, shown.taken) == ("rack: h1", "full", (OTHER,))
    (query,) = api.queries
    assert (query.host, query.after, query.before) == ("rack: h1", 100.0 - AROUND_S, 100.0 + AROUND_S)
    # Who else builds there is no project's affair.
    (shown,) = await pages._lost_claims(mine, WebCaller("alice", WebRole.PROJECT, "p"))
    assert shown.taken == () and len(api.queries) == 1
