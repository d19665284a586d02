"""The client that berth is: follows builds to their ends, reads hosts by pages, knows when all have reported."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from berth import bus_client as client_module
from berth.audit import facts as gather
from berth.audit.facts import REPORT_TIMEOUT_S, SILENCE_S, Reports
from berth.audit.invariants import InstanceFact
from berth.bus_client import BuildClient, host_pages
from berth.bus_client import actions as client_moves
from berth.bus_client.actions import ActionClient
from berth.bus_client.host_pages import json_of, read_hosts
from berth.bus_client.object_edits import project_usage
from berth.config.settings import CellSettings, Settings
from berth.config.site import Site
from berth.web.api import WebApi
from berth.web.pages.fleet import FleetReader
from bus.bus import API, Bus
from bus.clock import SystemClock
from bus.consuming.outcome import Done, Received
from bus.contracts.actions import ActionEvent, ActionKind, ActionRecord, ActionRequest, ActionState
from bus.contracts.base import Message, Meta
from bus.contracts.build import (
    BuildEvent,
    BuildRecord,
    BuildRequest,
    BuildState,
    HostRecord,
    HostsPage,
    HostsQuery,
)
from bus.contracts.cell import HostReport, HostStates, Running
from bus.contracts.placement_queries import ProjectUsagePage, ProjectUsageQuery
from bus.faults import RequestRefused
from bus.retrying import CLIENT_PUBLISH
from bus.tracing.context import Span
from bus.tracing.tracer import Tracer
from bus.transport import BusUnavailable, PublishRefused
from cell_conductor.state.lease import Lease
from lab.load import LoadPlan, draw_requests
from tests.kit.waiting import until
from tests.unit.berth.world import ClientWorld

# --- the client that `berth` is: follows its builds to their ends, and queries when it receives nothing


def requests(count: int) -> list[BuildRequest]:
    return draw_requests(LoadPlan(boots=count, mix={"f": 1.0}), random.Random(7))


def record(request: BuildRequest, state: BuildState) -> BuildRecord:
    return BuildRecord(
        instance_uuid=request.instance_uuid, project_id=request.project_id, flavor=request.flavor, state=state
    )


class _Nowhere:
    """An exporter that is not called."""

    async def export(self, spans: Sequence[Span]) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "SILENCE_S", 0.01)


async def test_a_build_counts_as_published_once_it_is_confirmed(
    client_world: ClientWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, confirmed_at = client_world.client, []
    moments = itertools.count()
    monkeypatch.setattr(client, "_clock", SimpleNamespace(monotonic=lambda: float(next(moments))))
    publish = client.bus.publish_each

    async def slow(messages: Any) -> Any:
        errors = await publish(messages)
        confirmed_at.append(client._clock.monotonic())
        return errors

    monkeypatch.setattr(client.bus, "publish_each", slow)
    (request,) = requests(1)
    assert await client.submit([request], intended_at=[client._clock.monotonic()], flavors=["f"]) == [None]
    published_at = client.watches[request.instance_uuid].published_at
    assert published_at is not None and published_at >= confirmed_at[0]


async def test_a_client_without_the_tracer_that_it_had_begins_no_trace(client_world: ClientWorld) -> None:
    """Benchmarks do so to compare. The client had kept the tracer, and its requests were traced in both turns."""
    client = client_world.client
    tracer = Tracer(_Nowhere(), ratio=1.0, most_per_s=1000.0, rng=random.Random(1), monotonic=lambda: 1.0)
    for one, begun in ((tracer, 1), (None, 1), (tracer, 2)):
        client.bus.tracer = one
        await client.boot(draw_requests(LoadPlan(boots=1, mix={"f": 1.0}), random.Random(begun + (one is None) * 10)))
        assert await client.wait(20)
        assert len(tracer._spans) == begun


async def test_item_7_an_event_of_another_project_ends_no_build_of_ours(client_world: ClientWorld) -> None:
    """Any project may name our uuid in a request of its own, and is answered that this was refused."""
    client_world.answer_at_once = False
    (watch,) = await client_world.client.boot(requests(1))
    forged = BuildEvent(
        instance_uuid=watch.instance_uuid, project_id="evil", state=BuildState.REFUSED, sequence=99, terminal=True
    )
    await client_world.scheduler.publish(forged)
    await until(lambda: client_world.client.foreign_events == 1)
    assert (watch.state, client_world.client.unfinished) == ("requested", 1)


async def test_a_record_of_another_project_ends_no_build_of_ours(client_world: ClientWorld) -> None:
    """Ours was refused, as its uuid was taken, and the event of that was missed: it was `active`."""
    client_world.answer_at_once = False
    (request,) = requests(1)
    (watch,) = await client_world.client.boot([request])
    client_world.records[request.instance_uuid] = replace(record(request, BuildState.ACTIVE), project_id="evil")
    await client_world.client.resync()
    assert client_world.queries == 1
    assert (watch.state, client_world.client.unfinished) == ("requested", 1)


MOVE = ActionRequest(
    request_id="b0000000-0000-4000-8000-000000000000",
    instance_uuid="a0000000-0000-4000-8000-000000000000",
    project_id="p",
    kind=ActionKind.STOP,
)


@pytest.mark.parametrize("other", [{}, {"instance_uuid": f"c{MOVE.instance_uuid[1:]}"}, {"project_id": "evil"}])
@pytest.mark.parametrize("by", ["record", "event"])
async def test_a_request_is_its_id_its_instance_and_its_project(
    client_world: ClientWorld, monkeypatch: pytest.MonkeyPatch, other: dict[str, str], by: str
) -> None:
    """A client gives one id to requests about two instances: the end of the first ended the second as `done`."""
    monkeypatch.setattr(client_moves, "SILENCE_S", 0.01)
    actions, heard = (
        ActionClient(client_world.client.bus, clock=client_world.clock, process="moves"),
        list[ActionEvent](),
    )
    await actions.open()
    actions.on_event(heard.append)
    await actions.submit([MOVE])
    names = {"request_id": MOVE.request_id, "instance_uuid": MOVE.instance_uuid, "project_id": "p"}
    of: dict[str, Any] = {"kind": MOVE.kind, "state": ActionState.DONE}
    if by == "record":
        client_world.actions.append(ActionRecord(**{**names, **other}, **of, terminal=True))
        waiting = asyncio.create_task(actions.wait(20))
        await until(lambda: client_world.queries > 1 or not actions.unfinished)
        waiting.cancel()
    else:
        await client_world.scheduler.publish(ActionEvent(**{**names, **other}, **of, sequence=20, terminal=True))
        await client_world.scheduler.publish(ActionEvent(**names, **of, sequence=21))
        await until(lambda: (bool(heard) and heard[-1].sequence == 21) or not actions.unfinished)
    assert actions.unfinished == bool(other)
    await actions.close()


async def test_a_delete_that_was_given_up_ends_though_its_event_has_no_number(client_world: ClientWorld) -> None:
    """Its build's events have numbers already; a chaos run waited for the delete's end for ever."""
    (watch,) = await client_world.client.boot(requests(1))
    assert await client_world.client.wait(20)
    client_world.answer_at_once = False
    (deleting,) = await client_world.client.delete([record(requests(1)[0], BuildState.ACTIVE)])
    assert deleting.instance_uuid == watch.instance_uuid
    progress = BuildEvent(
        instance_uuid=watch.instance_uuid, project_id=watch.project_id, state=BuildState.DELETING, sequence=20
    )
    given_up = msgspec.structs.replace(progress, state=BuildState.REFUSED, sequence=0, terminal=True)
    await client_world.scheduler.publish_all([(event, "") for event in (progress, given_up, given_up)])
    await until(lambda: deleting.repeats == 1)
    assert (deleting.state, deleting.terminals, client_world.client.unfinished) == ("refused", 1, 0)


async def test_a_delete_ends_with_deleted_though_a_crashed_database_numbers_anew(client_world: ClientWorld) -> None:
    """The client had events that the cell's database forgot in a crash: the last event has a lower number then."""
    (request,) = requests(1)
    client_world.answer_at_once = False
    (watch,) = await client_world.client.delete([record(request, BuildState.ACTIVE)])
    await client_world.notify(request, BuildState.ACTIVE, 15)
    await client_world.notify(request, BuildState.DELETED, 13)
    await client_world.notify(request, BuildState.DELETED, 13)
    await until(lambda: watch.repeats == 1)
    assert (watch.state, watch.terminals, watch.sequence, client_world.client.unfinished) == ("deleted", 1, 15, 0)


async def test_of_many_builds_it_is_known_which_were_accepted_before_the_queue_was_full(
    client_world: ClientWorld,
) -> None:
    """A load of 20,000 ended with an error, and machines whose uuids were lost."""
    client_world.answer_at_once = False
    client_world.full = set(range(2, 60))
    with pytest.raises(PublishRefused):
        await client_world.client.boot(requests(1200), retry_for_s=8 * CLIENT_PUBLISH.first_s)
    accepted = [watch for watch in client_world.client.watches.values() if watch.published_at is not None]
    assert len(accepted) == 1000


async def test_many_builds_wait_for_a_full_queue_to_have_room(client_world: ClientWorld) -> None:
    client_world.full = {2, 3}
    watches = await client_world.client.boot(requests(1200), retry_for_s=20.0)
    assert all(watch.published_at is not None for watch in watches) and len(watches) == 1200


async def test_an_event_that_was_missed_is_requested(client_world: ClientWorld) -> None:
    client_world.mute = True
    (watch,) = await client_world.client.boot(requests(1))
    assert await client_world.client.wait(20)
    assert (watch.state, watch.last) == ("active", None)
    assert client_world.queries >= 1


async def test_an_event_that_arrives_after_its_end_was_queried_is_no_second_end(client_world: ClientWorld) -> None:
    """A broker that fails over holds an event for seconds; the client has queried the record by then."""
    client_world.mute = True
    ends: list[str] = []
    client_world.client.on_end(lambda watch: ends.append(watch.state))
    (request,) = requests(1)
    (watch,) = await client_world.client.boot([request])
    assert await client_world.client.wait(20)
    client_world.mute = False
    await client_world.notify(request, BuildState.ACTIVE, 3)
    await until(lambda: watch.last is not None)
    assert (watch.state, watch.terminals, ends) == ("active", 1, ["active"])
    await client_world.notify(request, BuildState.ACTIVE, 4)
    await until(lambda: watch.sequence == 4)
    assert watch.terminals == 2, "another end than the one on record is counted"


async def test_a_repeated_or_late_event_changes_nothing(client_world: ClientWorld) -> None:
    client_world.answer_at_once = False
    (request,) = requests(1)
    (watch,) = await client_world.client.boot([request])
    await client_world.notify(request, BuildState.ACTIVE, 12)
    await client_world.notify(request, BuildState.ACTIVE, 12)
    await client_world.notify(request, BuildState.BUILDING, 10, terminal=False)
    await until(lambda: watch.repeats == 2)
    assert (watch.terminals, watch.state) == (1, "active")


async def test_a_delete_ends_when_the_machine_is_gone_and_not_before(client_world: ClientWorld) -> None:
    """The build that it overtakes may still end first."""
    (request,) = requests(1)
    client_world.answer_at_once = False
    client_world.records[request.instance_uuid] = record(request, BuildState.BUILDING)
    (watch,) = await client_world.client.delete([record(request, BuildState.BUILDING)])
    await client_world.notify(request, BuildState.ACTIVE, 12)
    assert not await client_world.client.wait(0.0)
    await client_world.notify(request, BuildState.DELETED, 15)
    await until(lambda: watch.ended_at is not None)
    assert watch.state == "deleted"


async def test_a_delete_of_what_is_gone_has_ended(client_world: ClientWorld) -> None:
    (request,) = requests(1)
    (watch,) = await client_world.client.delete([record(request, BuildState.DELETED)])
    assert await client_world.client.wait(0.0)
    assert watch.state == "deleted"


async def test_with_patience_an_outage_only_delays(client_world: ClientWorld) -> None:
    publish = client_world.client.bus.publish_each
    failures = 3

    async def unavailable(messages, **options):  # type: ignore[no-untyped-def]
        nonlocal failures
        failures -= 1
        if failures >= 0:
            return [BusUnavailable("unavailable")] * len(messages)
        return await publish(messages, **options)

    client_world.client.bus.publish_each = unavailable  # type: ignore[method-assign]
    with pytest.raises(BusUnavailable):
        await client_world.client.boot(requests(1))
    later = requests(3)[1:]
    watches = await client_world.client.boot(later, retry_for_s=60.0)
    await until(lambda: all(watch.ended_at is not None for watch in watches))
    assert failures < 0


# --- lists of hosts are read a page at a time, whichever releases the schedulers are of


HOSTS = tuple(
    HostRecord(uuid=f"{at:08x}-0000-4000-8000-000000000000", name=f"h{at // 2}", cell="c", service="s", up=True)
    for at in range(7)
)


class Schedulers:
    """A bus on which schedulers answer in turn. hosts: what each of them knows."""

    def __init__(self, hosts: Sequence[Sequence[HostRecord]] = (HOSTS,)) -> None:
        self.hosts = hosts
        self.queries: list[HostsQuery] = []

    async def request(self, query: Message, _reply: type[Any], **_: Any) -> HostsPage:
        assert isinstance(query, HostsQuery)
        known = self.hosts[len(self.queries) % len(self.hosts)]
        self.queries.append(query)
        found = [host for host in known if host.uuid > (query.after_uuid or "")]
        found.sort(key=lambda host: ("" if query.by_uuid else host.name, host.uuid))
        more = len(found) > query.limit
        return HostsPage(hosts=tuple(found[: query.limit]), feed_sequence=len(self.queries), more=more)


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "HOSTS_PER_PAGE", 3)


def all_by(reader: str, bus: Any) -> Callable[[], Awaitable[Sequence[HostRecord]]]:
    async def by_command() -> Sequence[HostRecord]:
        client = BuildClient.__new__(BuildClient)  # it needs a bus for this, and nothing else
        client.bus = bus
        return (await client.hosts(limit=1000, timeout_s=1.0)).hosts

    async def by_api() -> Sequence[HostRecord]:
        api = WebApi.__new__(WebApi)
        api._bus = bus
        return (await api.hosts(HostsQuery())).hosts

    return {"command": by_command, "api": by_api, "pages": FleetReader(bus, SystemClock(), ("c",)).hosts}[reader]


@pytest.mark.parametrize("reader", ["command", "api", "pages"])
async def test_item_16_no_answer_has_more_hosts_than_a_page(reader: str) -> None:
    """40,000 hosts in one answer were one call of C, of up to 43 ms."""
    schedulers = Schedulers()
    await all_by(reader, schedulers)()
    assert [one.limit for one in schedulers.queries] == [3, 3, 3, 3]
    followed = [one.after_uuid for one in schedulers.queries if one.by_uuid]
    assert followed == [None, HOSTS[2].uuid, HOSTS[5].uuid], "the first query shows that there is more than a page"


@pytest.mark.parametrize("reader", ["command", "api", "pages"])
async def test_as_many_hosts_as_a_page_has_are_one_query(reader: str) -> None:
    schedulers = Schedulers(hosts=(HOSTS[:3],))
    assert tuple(await all_by(reader, schedulers)()) == HOSTS[:3] and len(schedulers.queries) == 1


def named(*names: str) -> tuple[HostRecord, ...]:
    return tuple(replace(host, name=name) for host, name in zip(HOSTS, names, strict=True))


@pytest.mark.parametrize("reader", ["command", "api", "pages"])
@pytest.mark.parametrize(
    "hosts",
    [
        (HOSTS, named("z0", "z1", "z2", "h3", "h4", "h5", "h6")),  # the other one has read other announcements
        (HOSTS, named(*(one.uuid for one in HOSTS[::-1]))),  # ... or none yet
        (named("h6", "h5", "h4", "h3", "h2", "h1", "h0"), HOSTS),
        (named(*["h"] * 7), named(*["a"] * 7), HOSTS),  # several hosts of one name in different cells
    ],
)
async def test_each_host_is_listed_once_by_schedulers_that_know_hosts_under_different_names(
    reader: str, hosts: Sequence[Sequence[HostRecord]]
) -> None:
    for turns in (hosts, hosts[::-1]):
        found = await all_by(reader, Schedulers(hosts=turns))()
        assert sorted(host.uuid for host in found) == [host.uuid for host in HOSTS]
        assert [(one.name, one.uuid) for one in found] == sorted((one.name, one.uuid) for one in found)


async def test_a_host_that_some_schedulers_do_not_know_hides_and_doubles_no_other() -> None:
    for missing in HOSTS:
        fewer = tuple(host for host in HOSTS if host != missing)
        for turns in ((HOSTS, fewer), (fewer, HOSTS)):
            found = await all_by("command", Schedulers(hosts=turns))()
            uuids = [host.uuid for host in found]
            assert sorted({*uuids, missing.uuid}) == [host.uuid for host in HOSTS] and len(uuids) == len(set(uuids))


@pytest.mark.parametrize("more", [True, False])
async def test_a_scheduler_that_repeats_a_page_is_not_queried_for_ever(more: bool) -> None:
    class Repeating(Schedulers):
        async def request(self, query: Message, _reply: type[Any], **_: Any) -> HostsPage:
            assert len(self.queries) < 10
            page = await super().request(query, _reply)
            return replace(page, hosts=(*HOSTS[:3], *HOSTS[:2]), more=more or len(self.queries) < 3)

    schedulers: Any = Repeating()
    page = await read_hosts(schedulers, HostsQuery(limit=100), timeout_s=1.0)
    assert (page.hosts, page.more) == (HOSTS[:3], more)


async def test_no_more_hosts_are_read_than_are_listed_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_pages, "MAX_HOSTS", 5)
    schedulers: Any = Schedulers()
    page = await read_hosts(schedulers, HostsQuery(limit=7), timeout_s=1.0)
    assert (len(page.hosts), page.more, len(schedulers.queries)) == (6, True, 3)


@pytest.mark.parametrize(("limit", "limits"), [(2, [2]), (3, [3]), (4, [3, 3, 3, 3]), (7, [3, 3, 3, 3])])
async def test_no_more_hosts_are_read_than_requested(limit: int, limits: list[int]) -> None:
    schedulers = Schedulers()
    page = await read_hosts(schedulers, HostsQuery(cell="c", limit=limit), timeout_s=1.0)  # type: ignore[arg-type]
    assert page.hosts == HOSTS[:limit] and page.more is (limit < 7)
    assert page.feed_sequence == (1 if limit <= 3 else 2)
    assert [one.limit for one in schedulers.queries] == limits
    assert {one.cell for one in schedulers.queries} == {"c"}


@pytest.mark.parametrize("answered", [0, 1])
async def test_a_query_that_is_refused_is_refused(answered: int) -> None:
    class Refusing(Schedulers):
        async def request(self, query: Message, _reply: type[Any], **_: Any) -> HostsPage:
            if len(self.queries) == answered:
                raise RequestRefused("unknown field `by_uuid`", code="message.invalid")
            return await super().request(query, _reply)

    with pytest.raises(RequestRefused):
        await read_hosts(Refusing(), HostsQuery(), timeout_s=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7])
async def test_item_16_a_list_is_written_in_parts_as_it_is_at_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, encode = HOSTS[:count], msgspec.json.encode
    written: list[int] = []

    def counted(part: Sequence[HostRecord]) -> bytes:
        written.append(len(part))
        return encode(part)

    monkeypatch.setattr(msgspec.json, "encode", counted)
    assert await json_of(hosts) == encode(hosts)
    assert max(written, default=0) <= 3 and sum(written) == count


# --- when enough hosts have reported: not before every service that must has reported


REPORTS_HOSTS = [f"{n:08x}-0000-4000-8000-000000000000" for n in range(4)]
INSTANCE = "a0000000-0000-4000-8000-000000000000"


def page(
    sequence: int, *hosts: str, first_sequence: int = 0, pages: int = 1, service: str = "s", epoch: int = 1
) -> Received:
    running = (Running(instance_uuid=INSTANCE, attempt=sequence),)
    listed = tuple(HostReport(uuid=uuid, name=uuid, running=running) for uuid in hosts)
    message = HostStates(
        service=service,
        cell="c",
        epoch=epoch,
        sequence=sequence,
        hosts=listed,
        first_sequence=first_sequence,
        pages=pages,
    )
    return Received(message, Meta(id="m", cause="", sent_at=0.0), "c", "q", False)


async def test_hosts_that_must_report_are_waited_for() -> None:
    reports = Reports(SystemClock(), {REPORTS_HOSTS[0], REPORTS_HOSTS[3]})
    await reports.take([page(1, REPORTS_HOSTS[0])])
    assert not reports.is_complete
    await reports.take([page(2, REPORTS_HOSTS[3])])
    assert reports.is_complete


async def test_a_report_that_began_is_waited_for_page_by_page() -> None:
    reports = Reports(SystemClock(), set())
    await reports.take(
        [page(7, REPORTS_HOSTS[2], first_sequence=5, pages=3), page(5, REPORTS_HOSTS[0], first_sequence=5, pages=3)]
    )
    await reports.take([page(5, REPORTS_HOSTS[0], first_sequence=5, pages=3)])  # twice
    assert not reports.is_complete
    await reports.take([page(6, REPORTS_HOSTS[1], first_sequence=5, pages=3)])
    assert reports.is_complete
    assert [(fact.host_uuid, fact.attempt) for fact in reports.facts()] == [
        (REPORTS_HOSTS[2], 7),
        (REPORTS_HOSTS[0], 5),
        (REPORTS_HOSTS[1], 6),
    ]
    await reports.take([page(9, REPORTS_HOSTS[0], first_sequence=9, pages=2)])
    await reports.take([page(8, REPORTS_HOSTS[0], first_sequence=8)])  # one that began before, and comes late
    assert not reports.is_complete
    assert [fact.attempt for fact in reports.facts() if fact.host_uuid == REPORTS_HOSTS[0]] == [9]
    await reports.take([page(1, REPORTS_HOSTS[0], first_sequence=1, epoch=2)])  # the service began anew
    assert reports.is_complete


async def test_a_report_of_another_services_host_does_not_count() -> None:
    """As in its cell. A second service with a host of the same uuid reported it empty, which was taken for a proof."""
    reports = Reports(SystemClock(), {REPORTS_HOSTS[0], REPORTS_HOSTS[1]})
    await reports.take([page(1, REPORTS_HOSTS[0])])
    for uuid in REPORTS_HOSTS[:2]:
        theirs = HostReport(uuid=uuid, name="h", running=(), owner="s")
        message = HostStates(service="second", cell="c", epoch=9, sequence=1, hosts=(theirs,))
        await reports.take([Received(message, Meta(id="m", cause="", sent_at=0.0), "c", "q", False)])
    assert [fact.instance_uuid for fact in reports.facts()] == [INSTANCE]
    assert reports.hosts() == {REPORTS_HOSTS[0]} and not reports.is_complete


class MovedClock(SystemClock):
    """A clock that goes on by what is slept."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_hosts_that_do_not_answer_are_waited_for_some_seconds_and_not_a_minute() -> None:
    clock = MovedClock()
    no_service = Reports(clock, {REPORTS_HOSTS[0]})
    await no_service.whole()
    assert clock.now < 2 * SILENCE_S < REPORT_TIMEOUT_S and not no_service.has_whole("s")
    began = clock.now
    some = Reports(clock, {REPORTS_HOSTS[0], REPORTS_HOSTS[1]})
    await some.take(
        [page(1, REPORTS_HOSTS[0], first_sequence=1), page(1, REPORTS_HOSTS[2], first_sequence=1, pages=2, service="t")]
    )
    await some.whole()
    assert clock.now - began < 2 * SILENCE_S
    assert some.has_whole("s") and not some.has_whole("t")


@pytest.mark.parametrize("unknown", [{"running": None}, {"owner": "another"}], ids=["not seen", "of another service"])
async def test_a_service_has_not_reported_whole_while_a_host_of_it_is_only_named(unknown: dict[str, Any]) -> None:
    """What it ran was called an instance without a machine, and what it may run proved an orphan."""
    reports = Reports(SystemClock(), set())
    whole = page(1, REPORTS_HOSTS[0], first_sequence=1)
    named = replace(whole.message.hosts[0], uuid=REPORTS_HOSTS[1], **unknown)  # type: ignore[attr-defined]
    more = replace(whole, message=replace(whole.message, hosts=(*whole.message.hosts, named)))  # type: ignore[attr-defined]
    await reports.take([more])
    assert not reports.has_whole("s")
    await reports.take([page(2, REPORTS_HOSTS[1], first_sequence=2)])
    assert reports.has_whole("s")


async def test_item_28_a_service_that_no_lease_calls_down_and_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its conductor is dead as well, or its lease has not expired yet."""

    leases = {("c", name): Lease(service=name, epoch=1) for name in ("s", "slow")}

    async def database_id(database: object) -> str:
        return "d"

    async def cell_report(site: Site, cell: str, missing: set[str], database_id: str | None) -> Reports:
        reports = Reports(SystemClock(), missing, database_id)
        pages = [
            page(1, REPORTS_HOSTS[0], first_sequence=1),
            page(1, REPORTS_HOSTS[3], first_sequence=1, pages=2, service="half"),
        ]
        await reports.take(pages)
        return reports

    monkeypatch.setattr(gather, "read_database_id", database_id)
    monkeypatch.setattr(gather, "_cell_report", cell_report)
    # The host of "s" that its whole report lacks has lost its machine; its service is there.
    where = {REPORTS_HOSTS[0]: "s", REPORTS_HOSTS[1]: "s", REPORTS_HOSTS[2]: "half"}
    there = [InstanceFact(INSTANCE, "c", "active", host, 1, service) for host, service in where.items()]
    there.append(InstanceFact(INSTANCE, "c", "active", "00000009-0000-4000-8000-000000000000", 1, "silent"))
    place = Site(Settings(cells={"c": CellSettings()}))
    running, silent, _, unheard = await gather._running(place, {"c": None}, there, leases)  # type: ignore[dict-item]
    assert {fact.host_uuid for fact in running} == {REPORTS_HOSTS[0], REPORTS_HOSTS[3]}
    assert {name: (one.service, one.reason, one.is_expected) for (_, name), one in silent.items()} == {
        name: (name, f"it did not answer within {SILENCE_S:g} s", False) for name in ("half", "silent")
    }
    assert unheard == [("c", "slow")], "nothing is proved about what it runs"


async def test_checks_of_two_processes_share_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waited for the first, which takes long while a service is silent, and was given up after a minute."""
    names: set[str] = set()

    class Named(Site):
        def bus(self, process: str, name: str = API) -> Bus:
            names.add(process)
            raise LookupError

    for pid in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        with contextlib.suppress(LookupError):
            await gather._cell_report(Named(Settings()), "c", set(), None)
    assert len(names) == 2


# --- the usage of all projects


async def test_the_usage_of_all_projects_is_whole_however_many_pages_it_has() -> None:
    """Those behind the fiftieth page were shown as holding nothing."""
    projects = [f"p{number:03}" for number in range(120)]

    class Paging:
        async def request(self, query: ProjectUsageQuery, *_: object, **__: object) -> ProjectUsagePage:
            behind = [one for one in projects if query.after is None or one > query.after]
            return ProjectUsagePage(usage={behind[0]: {"VCPU": 1}}, more=len(behind) > 1)

    found = await project_usage(cast(Bus, Paging()), (), timeout_s=1.0)
    assert sorted(found) == projects


async def test_a_client_of_requests_takes_no_event_of_another_one(client_world: ClientWorld) -> None:
    """Other clients' events have this client's key when their projects name its ids."""
    bus = client_world.client.bus
    actions = ActionClient(bus, clock=bus.clock, process="p")
    heard: list[ActionEvent] = []
    actions._listeners.append(heard.append)
    (request,) = requests(1)
    mine = ActionRequest(
        request_id="a0000000-0000-4000-8000-000000000000",
        instance_uuid=request.instance_uuid,
        project_id="p",
        kind=ActionKind.STOP,
    )
    actions._open[mine.request_id] = mine
    end = ActionEvent(
        request_id=mine.request_id, instance_uuid=mine.instance_uuid, project_id="p", kind=ActionKind.STOP,
        state=ActionState.DONE, sequence=3, terminal=True,
    )  # fmt: skip
    events = [replace(end, request_id="b0000000-0000-4000-8000-000000000000"), replace(end, project_id="evil"), end]
    batch = [Received(message=one, meta=Meta(id="m"), bus="api", queue="q") for one in events]
    assert await actions._on_events(batch) == [Done()] * 3
    assert heard == [end] and actions.ended == {mine.request_id: end}
