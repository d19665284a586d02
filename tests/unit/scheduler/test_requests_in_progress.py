"""The requests that a scheduler has begun: a repeated call of their handler may have to release their claims."""

from __future__ import annotations

from msgspec.structs import replace

from bus.clock import SystemClock
from bus.consuming.outcome import Received
from bus.contracts.base import Meta, Refusal
from bus.contracts.build import BuildRequest
from scheduler_worker.cancellations import Cancellations
from scheduler_worker.domain.builds import Author
from scheduler_worker.domain.decisions import given_up
from scheduler_worker.domain.pending import PendingBuild, pending_build
from scheduler_worker.engine import RequestRecorder, begun
from scheduler_worker.store.memory import MemoryBuilds, MemoryBuildTable
from tests.kit.claims import BookClaims
from tests.kit.sent import Sent
from tests.unit.scheduler.hosts import Hosts

REQUEST = BuildRequest(instance_uuid="00000000-0000-4000-8000-000000000001", flavor="m1.small", project_id="p")


def taken(request: BuildRequest) -> PendingBuild:
    received = Received(request, Meta(id="m", sent_at=990.0), "api", "scheduler.requests")
    return pending_build(received, 0, now=1000.0, flavors=Hosts([]).selector, max_age_s=100.0)


async def test_a_request_is_in_progress_until_its_own_run_ends() -> None:
    """A clash, or a copy that its client has sent anew, is no run of it: both have an outcome at once."""
    clock = SystemClock()
    store = MemoryBuilds(MemoryBuildTable(clock).session())
    store.publish_through(Sent())  # type: ignore[arg-type]
    cancellations = Cancellations(store, BookClaims(), lambda _: None, clock=clock, process="s1")
    recorder = RequestRecorder(store, cancellations, clock=clock, process="s1")
    other = RequestRecorder(store, cancellations, clock=clock, process="s2")
    request, clash = taken(REQUEST), taken(replace(REQUEST, name="other"))
    admissions = await recorder.record([request])
    author = Author("s1", 1001.0)
    failed = given_up(REQUEST, Refusal(code="why", reason=""), author)
    async with store.unit() as unit:
        await unit.write_decisions([failed], author.at)
    for fresh in (clash, request):
        of_fresh = await other.record([fresh])
        assert [one.release for one in of_fresh] == [False] and not other.may_have_run(fresh)
        recorder.finish(begun([fresh], of_fresh))
        assert recorder.may_have_run(request)
    assert [one.release for one in await recorder.record([request])] == [True]
    recorder.finish(begun([request], admissions))
    assert not recorder.may_have_run(request)
