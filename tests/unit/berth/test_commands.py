"""Commands of operators, without a system."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import typer
from msgspec.structs import replace
from typer.testing import CliRunner

from berth.audit.findings import Confirmed
from berth.audit.passes import AuditPass
from berth.bus_client import BuildClient
from berth.cli import common
from berth.cli.claims import checks as audits
from berth.cli.claims import quarantine as safety
from berth.cli.common import Stop
from berth.cli.fleet.drains import _ended
from berth.cli.instance import actions, instances, several
from berth.cli.instance.instances import BootOptions, show_record
from berth.cli.main import app
from berth.cli.objects import objects
from berth.cli.objects.objects import MAX_FILE_BYTES, read_file
from berth.cli.output import Form
from berth.cli.site import dead_letters
from berth.client import ApiProblem, ApiUnavailable
from berth.client.repair_types import BreakersAfterReset, BreakersReset, BreakerView, DeadLettersPurged, DeadLetterView
from berth.client.types import Accepted, ChangeBody, ObjectList
from berth.config.settings import FencingSettings, Settings
from berth.config.site import Site
from berth.dead_letters import is_expired, send_back
from berth.drain_follow import STUCK_S, follow
from berth.fencing.fencer import CELL_SILENT, TOO_MANY, Fencer, FencingPlan, plan
from berth.fencing.plugin import FencingPlugin
from berth.web.pages.dead_letters import DeadLetterActions
from bus.clock import SystemClock
from bus.codec import SENT_AT
from bus.consuming import dead_letters as letters
from bus.consuming.dead_letters import DeadLetter
from bus.contracts.actions import ActionKind, ActionRecord, ActionState
from bus.contracts.build import BuildRecord, BuildState, FunnelStep, HostRecord, HostScore, HostsPage, TimelineEntry
from bus.contracts.drains import DrainFailure, DrainMoveState, DrainProgress, DrainState, DrainTarget
from bus.contracts.objects import (
    CellState,
    ObjectKind,
    ObjectsChanged,
    ObjectsPage,
    StoredObject,
)
from bus.contracts.operations import AdminState, HostAdminState, ServiceRecord, ServicesPage, SetAdminState
from bus.contracts.placement import ConflictingConsumer
from bus.contracts.queues import BY_QUEUE, DEAD
from bus.faults import DatabaseUnavailable, RequestRefused
from bus.memory import MemoryBroker, MemoryTransport
from bus.transport import Outgoing, PublishRefused
from tests.kit.api_client import CONTEXT, answered_by
from tests.kit.virtual_time import on_virtual_time

# --- which silent hosts are switched off without a person


SETTINGS = FencingSettings(after_s=60.0, max_hosts=2)
OTHERS = ServiceRecord(name="others", cell="c1", up=True, hosts=9)


def host(number: int = 1, **more: Any) -> HostRecord:
    fields: dict[str, Any] = {"cell": "c1", "service": f"s{number}", "resources": {"VCPU": (4.0, 16.0)}, **more}
    return HostRecord(uuid=f"00000000-0000-4000-8000-00000000000{number}", name=f"h{number}", **fields)


def service(number: int = 1, **more: Any) -> ServiceRecord:
    fields: dict[str, Any] = {"cell": "c1", "up": False, "code": "service.silent", "hosts": 1, **more}
    return ServiceRecord(name=f"s{number}", **fields)


def planned(after_s: float, hosts: list[HostRecord], *services: ServiceRecord) -> FencingPlan:
    """The plan at the second of two looks that see the same."""
    first = plan(hosts, services, {}, SETTINGS, 1000.0)
    assert (first.due, first.held) == ((), {})
    return plan(hosts, services, first.suspects, SETTINGS, 1000.0 + after_s)


def test_a_host_is_due_when_it_was_silent_at_each_look_for_long_enough() -> None:
    assert planned(59.9, [host()], service(), OTHERS).due == ()
    assert planned(60.0, [host()], service(), OTHERS).due == (host(),)


def test_suspicion_begins_anew_when_the_service_reported_between() -> None:
    suspected = plan([host()], [service(), OTHERS], {}, SETTINGS, 0.0)
    reported = plan([], [service(up=True, code=""), OTHERS], suspected.suspects, SETTINGS, 30.0)
    assert reported.suspects == {}
    assert plan([host()], [service(), OTHERS], reported.suspects, SETTINGS, 61.0).due == ()


ADMIN = HostAdminState(host_uuid=host().uuid, host="h1", state=AdminState.MAINTENANCE)


@pytest.mark.parametrize(
    ("one", "its_service"),
    [
        (host(), service(code="service.stopped")),  # on purpose
        (host(), service(up=True, code="")),
        (host(), service(hosts=2)),  # the service died, and its hosts may run
        (host(), replace(service(), cell="c2")),
        (host(up=True), service()),
        (host(resources={"VCPU": (0.0, 16.0)}), service()),  # nothing is there to be evacuated
        (host(resources={}), service()),
        (host(admin=ADMIN), service()),
        (host(admin=replace(ADMIN, state=AdminState.FENCED)), service()),
    ],
)
def test_what_is_never_switched_off(one: HostRecord, its_service: ServiceRecord) -> None:
    found = planned(600.0, [one], its_service, OTHERS)
    assert (found.due, found.suspects) == ((), {})


def test_a_host_that_only_takes_no_builds_is_switched_off_like_others() -> None:
    disabled = host(admin=replace(ADMIN, state=AdminState.DISABLED))
    assert planned(60.0, [disabled], service(), OTHERS).due == (disabled,)


def looked(
    hosts: list[HostRecord], *services: ServiceRecord, suspects: Mapping[str, float] | None = None
) -> FencingPlan:
    """The plan of a look at 1000."""
    return plan(hosts, services, suspects or {}, SETTINGS, 1000.0)


def test_with_more_suspects_than_allowed_none_is_switched_off_and_their_time_begins_anew() -> None:
    three = [host(1), host(2), host(3)]
    found = looked(three, service(1), service(2), service(3), OTHERS, suspects={one.uuid: 0.0 for one in three})
    assert found.due == () and found.held == {"h1": TOO_MANY, "h2": TOO_MANY, "h3": TOO_MANY}
    for at_s, due in ((1001.0, ()), (1059.9, ()), (1060.0, (host(1), host(2)))):
        assert plan(three[:2], [service(1), service(2), OTHERS], found.suspects, SETTINGS, at_s).due == due


def test_a_suspect_counts_before_its_time() -> None:
    """The network fails for one host after the other."""
    three = [host(1), host(2), host(3)]
    found = looked(three, service(1), service(2), service(3), OTHERS, suspects={host(1).uuid: 0.0})
    assert found.due == () and found.suspects[host(1).uuid] == 1000.0


def test_where_no_service_of_the_cell_is_up_the_cell_is_what_is_silent() -> None:
    suspects = {host().uuid: 0.0}
    found = looked([host()], service(), replace(OTHERS, cell="c2"), suspects=suspects)
    assert found.due == () and found.held == {"h1": CELL_SILENT} and found.suspects == {host().uuid: 1000.0}


class TwoSilentHosts(SystemClock):
    """A fleet as a client sees it, a plug-in, and the clock of both. The second host reports again while the first one
    is switched off.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.silent = [1, 2]
        self.off: list[str] = []
        self.bus = self

    async def request(self, *_: Any, **__: Any) -> ObjectsPage:
        return ObjectsPage(revision=1)

    def monotonic(self) -> float:
        return self.now_s

    async def services(self, **_: Any) -> ServicesPage:
        return ServicesPage(services=(OTHERS, *map(service, self.silent)))

    async def hosts(self, **_: Any) -> HostsPage:
        return HostsPage(hosts=tuple(map(host, self.silent)), feed_sequence=1)

    async def switch_off(self, host: HostRecord) -> str:
        self.off.append(host.name)
        self.silent = []
        return "off"

    async def set_admin_state(self, decision: SetAdminState, **_: Any) -> HostAdminState:
        return replace(ADMIN, state=decision.state)


async def test_a_host_that_reports_while_another_one_is_switched_off_stays_on() -> None:
    """It was switched off by what was known a minute before, with all that ran there."""
    fleet = TwoSilentHosts()
    fencer = Fencer(cast(BuildClient, fleet), cast(FencingPlugin, fleet), SETTINGS, clock=fleet)
    for fleet.now_s in (0.0, 60.0, 62.0):
        await fencer.look()
    assert fleet.off == ["h1"]


# --- dead letters that may not go back: a delete or a release of them may be forgotten


NOW = 1_800_000_000.0
HOUR_S = 3600.0
BUILD, CLAIM, REQUEST, DELETE = "cell.build.v1", "placement.claim.v1", "build.request.v1", "cell.delete.v1"
QUEUE = "conductor.requests"


def dead_letter(
    kind: str, age_s: float | None, *, body: bytes = b"{}", batch: bool = False, code: str = "c"
) -> DeadLetter:
    sent_at = None if age_s is None else NOW - age_s
    return DeadLetter(
        queue=QUEUE,
        position=0, id="m", code=code, reason="", type="" if batch else kind, exchange="", routing_key="", cause="",
        died_at=NOW, sent_at=sent_at, batch=batch, body=body, headers={},
    )  # fmt: skip


OLD_BUILD = b'{"type": "cell.build.v1"}'
UNNAMED = json.dumps([{"meta": {"id": "x", "sent_at": NOW - 30 * HOUR_S}, "body": {}}]).encode()


def items(*ages_s: float) -> bytes:
    return json.dumps([{"meta": {"id": "x", "sent_at": NOW - age}, "body": {"type": BUILD}} for age in ages_s]).encode()


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        pytest.param(dead_letter(BUILD, 22 * HOUR_S), False, id="its delete is remembered for a day"),
        pytest.param(dead_letter(BUILD, 23.5 * HOUR_S), True, id="clocks may be an hour off"),
        pytest.param(dead_letter(BUILD, None), True, id="of any age"),
        pytest.param(dead_letter(CLAIM, 30 * HOUR_S), True, id="a claim, whose ended attempts are gone"),
        pytest.param(dead_letter(CLAIM, HOUR_S), False, id="a claim, refused if it was released"),
        pytest.param(dead_letter(REQUEST, 900 * HOUR_S), False, id="the schedulers judge requests themselves"),
        pytest.param(
            dead_letter(DELETE, 1.0, code="broker.expired"), True, id="its requester knows that it is not done"
        ),
        pytest.param(dead_letter(DELETE, 900 * HOUR_S), False, id="a delete never builds anything"),
        pytest.param(dead_letter("", 30 * HOUR_S, body=OLD_BUILD), True, id="named in its body only"),
        pytest.param(dead_letter("", 1.0, body=items(HOUR_S, 30 * HOUR_S), batch=True), True, id="one old among many"),
        pytest.param(dead_letter("", 90 * HOUR_S, body=items(HOUR_S, 2 * HOUR_S), batch=True), False, id="none old"),
        pytest.param(dead_letter("", 30 * HOUR_S), True, id="named nowhere: its queue reads it by its key"),
        pytest.param(dead_letter("", 1.0, body=UNNAMED, batch=True), True, id="one of a batch that is named nowhere"),
        pytest.param(dead_letter(DELETE, 30 * HOUR_S, body=OLD_BUILD), True, id="named otherwise in its properties"),
        pytest.param(
            dead_letter("", None, body=b"[" * 100_000, batch=True), False, id="unreadable: refused where it goes"
        ),
        pytest.param(dead_letter("", None, body=b'{"type": "\xff"}'), False, id="no text: refused where it goes"),
    ],
)
def test_what_is_older_than_what_is_remembered(one: DeadLetter, *, expected: bool) -> None:
    assert is_expired(one, Settings(), NOW) is expected


@pytest.mark.parametrize(("old", "sent"), [(False, ["young"]), (True, ["ancient", "young"])])
async def test_old_builds_are_replayed_only_on_request(old: bool, sent: list[str]) -> None:
    transport = MemoryTransport(MemoryBroker(SystemClock()), "cell1")
    await transport.open()
    row = BY_QUEUE[QUEUE]
    await transport.declare_shared()
    await transport.declare_queue(row, QUEUE, row.bindings)
    headers: Mapping[str, float]
    for name, age_s in (("ancient", 48 * HOUR_S), ("young", HOUR_S)):
        headers = {SENT_AT: (NOW - age_s) * 1000}
        await transport.publish(
            Outgoing(exchange=DEAD, routing_key=QUEUE, body=b"{}", type=BUILD, message_id=name, headers=headers)
        )
    back = await send_back(transport, QUEUE, None, Settings(), now=NOW, old=old)
    assert (back.sent, back.too_old) == (sent, [] if old else ["ancient"])
    assert await transport.depth(QUEUE) == len(sent)
    await transport.close()


async def letters_of(transport: MemoryTransport, *names: str) -> None:
    for name in names:
        await transport.publish(Outgoing(exchange=DEAD, routing_key=QUEUE, body=b"{}", type=DELETE, message_id=name))


async def declared(broker: MemoryBroker) -> MemoryTransport:
    transport, row = MemoryTransport(broker, "cell1"), BY_QUEUE[QUEUE]
    await transport.open()
    await transport.declare_shared()
    await transport.declare_queue(row, QUEUE, row.bindings)
    return transport


async def test_a_replay_that_fails_midway_names_what_it_has_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = await declared(MemoryBroker(SystemClock()))
    await letters_of(transport, "first", "second", "third")
    real = transport.publish

    async def refuse_second(message: Outgoing) -> None:
        if message.message_id == "second":
            raise PublishRefused("full")
        await real(message)

    monkeypatch.setattr(transport, "publish", refuse_second)
    back = await send_back(transport, QUEUE, None, Settings(), now=NOW, old=False)
    assert back.sent == ["first"] and isinstance(back.fault, PublishRefused)
    with pytest.raises(PublishRefused):  # nothing was sent before it
        await send_back(transport, QUEUE, None, Settings(), now=NOW, old=False)
    assert [one.id for one in await letters.list_dead(transport, QUEUE)] == ["second", "third"]
    await transport.close()


async def test_a_purge_leaves_the_letters_that_came_after_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was sent back meanwhile and died again."""
    broker = MemoryBroker(SystemClock())
    there = await declared(broker)
    await letters_of(there, "again", "old")
    monkeypatch.setattr(Site, "transport", lambda *_, **__: MemoryTransport(broker, "cell1"))
    shown: list[str] = []

    def confirm(question: str, **_: Any) -> bool:
        shown.append(question)
        broker_queue = asyncio.ensure_future(letters_of(there, "again", "new"))
        arriving.append(broker_queue)
        return True

    arriving: list[asyncio.Future[None]] = []
    real = letters.purge

    async def once_arrived(*arguments: Any) -> int:
        await asyncio.gather(*arriving)
        return await real(*arguments)

    monkeypatch.setattr(typer, "confirm", confirm)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr(letters, "purge", once_arrived)
    actions = DeadLetterActions(Site(Settings()).environment("web"), Settings())

    class Api:
        async def list_dead_letters(self, bus: str, queue: str, *, limit: int) -> list[DeadLetterView]:
            return await actions.of_queue(bus, queue, limit)

        async def purge_dead_letters(self, bus: str, queue: str, *, until: str | None) -> DeadLettersPurged:
            return await actions.purge(bus, queue, until)

    answered_by(monkeypatch, Api(), dead_letters)
    await dead_letters.purge(CONTEXT, QUEUE, bus="api", yes=False, form=Form.JSON)
    assert "2 dead letters" in shown[0]
    assert [one.id for one in await letters.list_dead(there, QUEUE)] == ["again", "new"]
    await there.close()


# --- audits, as a program reads them


async def test_an_audit_says_as_json_what_it_did_not_judge_and_did_not_repair(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Lasting(Confirmed):
        def lasting(self, *_: object) -> bool:
            return True

    async def passes(*_: object, **__: object) -> AsyncIterator[AuditPass]:
        for _number in range(2):
            yield AuditPass((), (), Lasting(), 0.0, {"c1": DatabaseUnavailable("gone")})

    async def blind(*_: object, **__: object) -> dict[str, list[str]]:
        raise Stop(common.Exit.UNAVAILABLE, "audit.blind", "never started")

    monkeypatch.setattr(audits, "database_of", lambda _: None)
    monkeypatch.setattr(audits, "watch", passes)
    monkeypatch.setattr(audits, "audited", blind)
    assert await audits.audit(Settings(), repair=True, grace=0.0, form=Form.JSON, yes=True) == common.Exit.UNAVAILABLE
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["state"], one["code"]) for one in said] == [
        ("not_judged", "database.unavailable"),
        *[("not_repaired", "audit.blind")] * 2,
    ]
    assert said[0]["cell"] == "c1"


def test_an_audit_that_ends_before_its_grace_repairs_nothing_and_says_so() -> None:
    done = CliRunner().invoke(app, ["audit", "--repair"])
    assert done.exit_code == common.Exit.USAGE and "audit.grace" in done.output


# --- a breaker that trips anew while it is reset


async def test_a_reset_that_its_cell_has_not_taken_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tripped = BreakerView(cell="c2", service="s", open=True, tripped_at=1.0, lost=1, quarantined=0, over=0)

    class Api:
        async def list_breakers(self, **_: object) -> list[BreakerView]:
            return [tripped]

        async def reset_breakers(self, body: BreakersReset) -> BreakersAfterReset:
            return BreakersAfterReset((), body.breakers)

    answered_by(monkeypatch, Api(), safety)
    with pytest.raises(Stop) as stopped:
        await safety.reset(CONTEXT, "s", form=Form.JSON, yes=True)
    assert (stopped.value.status, stopped.value.code) == (common.Exit.NO, "breaker.not_open")
    assert capsys.readouterr().out == ""


# --- advice of the commands about drains, where instances are left


DRAIN, INSTANCE = (f"{dead_letter}0000000-0000-4000-8000-000000000000" for dead_letter in "da")


def test_a_drain_that_was_stopped_is_resumed() -> None:
    seen = DrainProgress(
        id=DRAIN, host="h", target=DrainTarget.HOST, kind=ActionKind.MIGRATE, by="ann", reason="fan",
        state=DrainState.ENDED, code="drain.stopped", started_at=0.0, deadline_at=None, per_minute=None, at_once=4,
        hosts=1, planned=3,
        counts={"waiting": 1}, not_started=(INSTANCE,),
    )  # fmt: skip
    with pytest.raises(Stop, match=f"1 instance not moved; see berth drain resume {DRAIN}"):
        _ended(seen, form=Form.TABLE)
    with pytest.raises(Stop, match=f"3 instances not moved; see berth drain resume {DRAIN}"):
        _ended(replace(seen, under_way=(INSTANCE, DRAIN)), form=Form.TABLE)


STUCK = DrainFailure(instance_uuid=INSTANCE, code="no_valid_host", reason="none of 3 hosts")


def running(**more: Any) -> DrainProgress:
    return DrainProgress(
        id=DRAIN, host="h", target=DrainTarget.HOST, kind=ActionKind.MIGRATE, by="ann", planned=1, counts={}, **more
    )


@pytest.mark.parametrize(
    ("seen", "status", "code"),
    [
        (running(failed=(STUCK,)), common.Exit.NO, "drain.left"),
        (running(failed=(STUCK,), not_started=(DRAIN,)), common.Exit.TIME, "drain.under_way"),
        (running(failed=(STUCK,), under_way=(DRAIN,)), common.Exit.TIME, "drain.under_way"),
        (running(under_way=(DRAIN,)), common.Exit.TIME, "drain.under_way"),
        (running(failed=(STUCK,), more=True), common.Exit.TIME, "drain.under_way"),
        (running(failed=(STUCK,), state=DrainState.PAUSED), common.Exit.TIME, "drain.under_way"),
        (running(), common.Exit.TIME, "drain.under_way"),
    ],
)
@on_virtual_time
async def test_whoever_waits_for_a_drain_is_told_when_nothing_left_can_move(
    seen: DrainProgress, status: common.Exit, code: str
) -> None:
    """The drain goes on. Not at once, because a service may just be restarted; and not after an hour."""
    clock, looks = SystemClock(), list[float]()

    async def read() -> DrainProgress:
        looks.append(clock.monotonic())
        return replace(seen, under_way=(DRAIN,)) if len(looks) == 3 else seen

    assert await follow(read, clock=clock, timeout_s=100.0) == seen
    took_s = looks[-1] - looks[3]
    assert STUCK_S <= took_s < 2 * STUCK_S if code == "drain.left" else took_s > 90.0
    with pytest.raises(Stop) as stopped:
        _ended(seen, form=Form.TABLE)
    assert (stopped.value.status, stopped.value.code) == (status, code)
    assert _ended(seen, form=Form.JSON) == status


@pytest.mark.parametrize(("moved", "left"), [(0, True), (1, False)])
@on_virtual_time
async def test_one_more_try_of_what_was_refused_does_not_begin_the_wait_anew(moved: int, *, left: bool) -> None:
    """With a try each few seconds `--wait` went on for ever. But where each try moves one, the drain is not stuck."""
    clock, looks = SystemClock(), list[float]()

    async def read() -> DrainProgress:
        looks.append(clock.monotonic())
        tries, counts = len(looks) % 8 == 0, {DrainMoveState.MOVED: moved * len(looks) // 8}
        seen = running(**{"under_way": (STUCK.instance_uuid,)} if tries else {"failed": (STUCK,)})
        return replace(seen, counts=counts)

    await follow(read, clock=clock, timeout_s=100.0)
    assert (looks[-1] - looks[0] < 2 * STUCK_S) is left


@on_virtual_time
async def test_a_drain_that_its_schedulers_have_forgotten_is_followed_no_more() -> None:
    """Their database was set back: the command died of an empty page."""

    async def read() -> None:
        return None

    with pytest.raises(RequestRefused) as refused:
        await follow(read, clock=SystemClock(), timeout_s=100.0)
    assert refused.value.code == "drain.unknown"


# --- `berth quota|cell|rule`: what an operator names is done, or refused with a word


class Api:
    """The objects on record, and the changes that are requested."""

    def __init__(self) -> None:
        self.stored: StoredObject | None = None
        self.changes: list[ChangeBody] = []

    async def list_objects(self, **_: object) -> ObjectList:
        return ObjectList(1, () if self.stored is None else (self.stored,))

    async def change_objects(self, body: ChangeBody) -> ObjectsChanged:
        self.changes.append(body)
        return ObjectsChanged(revision=2, changed=())

    def put(self, kind: ObjectKind, name: str, body: dict[str, Any]) -> None:
        self.stored = StoredObject(kind=kind, name=name, body=body, version=1, changed_at=0.0, changed_by="t")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    made = Api()
    answered_by(monkeypatch, made, objects)
    return made


def berth(*arguments: str) -> tuple[int, str]:
    ran = CliRunner().invoke(app, arguments)
    return ran.exit_code, " ".join(ran.output.replace("\u2502", " ").split())


def test_the_last_limit_of_a_quota_is_not_removed_in_silence(api: Api) -> None:
    api.put(ObjectKind.QUOTA, "demo", {"limits": {"VCPU": 4}})
    status, output = berth("quota", "unset", "demo", "VCPU")
    assert (status, api.changes) == (2, [])
    assert "(quota.last_limit)" in output and "berth quota delete demo" in output
    api.put(ObjectKind.QUOTA, "demo", {"limits": {"VCPU": 4, "MEMORY_MB": 1}})
    assert berth("quota", "unset", "demo", "VCPU")[0] == 0
    assert api.changes[0].changes[0].body == {"limits": {"MEMORY_MB": 1}}


@pytest.mark.parametrize("state", ["disable", "enable"])
def test_a_repeated_decision_about_a_cell_does_not_put_a_removed_one_back(api: Api, state: str) -> None:
    api.put(ObjectKind.CELL, "cell2", {"state": CellState.REMOVED.value, "bus": {"prefix": "new."}})
    status, output = berth("cell", state, "cell2", "--reason", "works")
    assert (status, "(cell.removed)" in output, api.changes) == (1, True, [])
    assert berth("cell", "remove", "cell2", "--reason", "again")[0] == 0
    assert berth("cell", "create", "cell2")[0] == 0
    assert api.changes[-1].changes[0].body == {"state": "enabled", "reason": "", "bus": {"prefix": "new."}}


def test_a_multiplier_and_all_multipliers_are_not_unset_at_once(api: Api) -> None:
    api.put(ObjectKind.SCHEDULING, "default", {"multipliers": {"ram": 2.0}})
    assert berth("rule", "unset", "multipliers", "--multiplier", "ram")[0] == 2
    assert api.changes == []
    assert berth("rule", "unset", "multipliers")[0] == 0
    assert api.changes[0].changes[0].body == {}


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("flavor create x --vcpus 1 --memory-mb 1", ObjectKind.FLAVOR),
        ("aggregate create x", ObjectKind.AGGREGATE),
        ("group create p/x --policy affinity", ObjectKind.GROUP),
    ],
)
def test_what_is_there_is_not_made_again_and_what_is_not_there_is_not_changed(
    api: Api, words: str, kind: ObjectKind
) -> None:
    noun, verb, name, *options = words.split()
    status, output = berth(noun, "set", name, *options)
    assert (status, "(object.unknown)" in output, api.changes) == (1, True, [])
    assert berth(*words.split())[0] == 0 and len(api.changes) == 1
    api.put(kind, name, {"policy": "affinity"})
    status, output = berth(noun, verb, name, *options)
    assert (status, "(object.exists)" in output, len(api.changes)) == (1, True, 1)
    assert berth(noun, "set", name, *options)[0] == 0


# --- files for `berth apply` that cannot be used: a sentence with the file, and no traceback


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"flavors = [", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (b"a = " + b"9" * 5000, "is not TOML"),
        (b"a = " + b"[" * 100_000, "is not TOML"),
        (b"#" * (MAX_FILE_BYTES + 1), "is larger than"),
        (b"[flavor.x]\nvcpus = 1\n", "a file has the sections flavors"),
        (b"[flavors]\nx = 1\n", "[flavors] has one table for each name"),
        (None, "cannot read {}: No such file or directory"),
    ],
    ids=["open", "bytes", "digits", "deep", "large", "section", "table", "absent"],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "objects.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(typer.BadParameter) as mistake:
        read_file(file)
    assert str(file) in mistake.value.message and message.replace("{}", str(file)) in mistake.value.message


# --- the output of `berth show` for a build


UUID = "10000000-0000-4000-8000-000000000001"
OTHER = "20000000-0000-4000-8000-000000000002"
BUILDING = TimelineEntry(at=1.0, actor="conductor cell1", what="building", detail="node1 (attempt 1)")
WAITING = TimelineEntry(at=2.5, actor="compute metal1", what="waiting", detail="waits for Ironic: ConnectError")


def test_what_a_build_waits_for_is_shown_while_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    record = BuildRecord(
        instance_uuid=UUID, project_id="p", flavor="bm.gold", state=BuildState.BUILDING, timeline=(BUILDING, WAITING)
    )
    show_record(record, history=False)
    assert "  waiting   since 00:00:02.500: waits for Ironic: ConnectError\n" in capsys.readouterr().out


def test_the_newest_choice_is_shown_and_of_which_request_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        TimelineEntry(at=at, actor="scheduler s", what=what, detail=detail, scores=(HostScore(host=host),))
        for at, what, detail, host in (
            (1.0, "chosen", "node1 of 2 candidates", "node1"),
            (2.0, "evacuate scheduled", f"to cell c1: node2 of 1 candidates, request {OTHER}", "node2"),
        )
    ]
    record = BuildRecord(
        instance_uuid=UUID, project_id="p", flavor="f", state=BuildState.ACTIVE, timeline=(*lines, BUILDING)
    )
    show_record(record, history=False)
    shown = capsys.readouterr().out
    assert f"  evacuate scheduled: to cell c1: node2 of 1 candidates, request {OTHER}\n" in shown
    assert "node1" not in shown


def test_the_hosts_that_refused_a_move_are_shown_and_of_which_request_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    record, action = (
        kind(
            instance_uuid=UUID,
            project_id="p",
            funnel=(FunnelStep(step=step, remaining=0, rejected={"full": 3}),),
            **more,
        )
        for kind, step, more in (
            (BuildRecord, "of_build", {"flavor": "f", "state": BuildState.ACTIVE}),
            (ActionRecord, "of_move", {"request_id": OTHER, "kind": ActionKind.RESIZE, "state": ActionState.FAILED}),
        )
    )
    show_record(record, action, history=False)
    shown = capsys.readouterr().out
    assert "of_move" in shown and f"request {OTHER}" in shown and "of_build" not in shown
    show_record(record, replace(action, funnel=()), history=False)  # another since then
    assert "of_build" in capsys.readouterr().out


def test_a_lost_claim_names_who_holds_what_was_lost(capsys: pytest.CaptureFixture[str]) -> None:
    lost = TimelineEntry(
        at=1.0,
        actor="scheduler s",
        what="not_claimed",
        detail="node1: no_capacity",
        conflicting_consumers=(ConflictingConsumer(consumer=OTHER, project_id="q"),),
    )
    record = BuildRecord(
        instance_uuid=UUID, project_id="p", flavor="bm.gold", state=BuildState.BUILDING, timeline=(lost, BUILDING)
    )
    show_record(record, history=True)
    assert f"node1: no_capacity; held by {OTHER}\n" in capsys.readouterr().out


async def test_another_projects_request_under_its_uuid_hides_no_reason_of_an_instance(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused, it is on record; its id was listed on the page of the instance, to the instance's project."""
    own_id = "b0000000-0000-4000-8000-000000000000"
    funnel = (FunnelStep(step="of_move", remaining=0, rejected={"full": 3}),)
    of: dict[str, Any] = {"instance_uuid": UUID, "kind": ActionKind.RESIZE, "terminal": True}
    theirs = ActionRecord(request_id=OTHER, project_id="q", state=ActionState.REFUSED, **of)
    own = ActionRecord(request_id=own_id, project_id="p", state=ActionState.FAILED, funnel=funnel, **of)

    class Actions:
        async def show_build(self, uuid: str) -> BuildRecord:
            return BuildRecord(instance_uuid=uuid, project_id="p", flavor="f", state=BuildState.ACTIVE)

        async def list_actions(self, *, project: str, limit: int, **_: object) -> list[ActionRecord]:
            return [one for one in (theirs, own) if one.project_id == project][:limit]

    answered_by(monkeypatch, Actions(), instances)
    await instances.show(CONTEXT, UUID)
    assert f"request {own_id}" in capsys.readouterr().out


# --- many calls of one command


class Creating:
    """Takes builds, but no more than `room` before an outage is over, and none of a flavor that there is not."""

    def __init__(self, room: int, outages: int) -> None:
        self.room, self.outages = room, outages
        self.taken: list[str] = []

    async def create_build(self, body: Mapping[str, Any]) -> Accepted:
        if len(self.taken) >= self.room and self.outages > 0:
            self.outages -= 1
            raise ApiProblem(503, "bus.unavailable", "full")
        if body["flavor"] == "nope":
            raise ApiProblem(422, "flavor.unknown", "there is no flavor nope")
        assert "by" not in body and "project_id" not in body, "the server fills these in"
        self.taken.append(body["instance_uuid"])
        return Accepted(body["instance_uuid"], {})


@on_virtual_time
async def test_of_many_builds_it_is_known_which_were_accepted_before_an_outage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Creating(room=20, outages=1_000_000)
    answered_by(monkeypatch, server, instances)
    with pytest.raises(ApiProblem) as problem:
        await instances.boot(CONTEXT, options=BootOptions(flavor="f", count=50, timeout=0.0, form=Form.JSON))
    assert problem.value.code == "bus.unavailable"
    shown = json.loads(capsys.readouterr().out)["items"]
    assert len(shown) == 20 and {one["instance_uuid"] for one in shown} == {*server.taken}


@on_virtual_time
async def test_many_builds_wait_for_room(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    server = Creating(room=20, outages=30)
    answered_by(monkeypatch, server, instances)
    assert await instances.boot(CONTEXT, options=BootOptions(flavor="f", count=50, timeout=20.0)) == 0
    assert len(server.taken) == len({*server.taken}) == 50
    assert len(capsys.readouterr().out.splitlines()) == 50


async def test_an_address_where_nothing_answers_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`berth boot` would hang for its whole time, without a word, at an address with a typing error."""
    tried: list[object] = []

    class Away:
        async def create_build(self, body: object) -> None:
            tried.append(body)
            raise ApiUnavailable("nothing answers")

    answered_by(monkeypatch, Away(), instances)
    with pytest.raises(ApiUnavailable):
        await instances.boot(CONTEXT, options=BootOptions(flavor="f", count=500, timeout=300.0))
    assert len(tried) <= 16


async def test_a_request_that_is_refused_is_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered_by(monkeypatch, Creating(room=20, outages=0), instances)
    options = BootOptions(flavor="nope", timeout=20.0, form=Form.JSON)
    assert await instances.boot(CONTEXT, options=options) == common.Exit.NO
    (shown,) = json.loads(capsys.readouterr().out)["items"]
    assert (shown["state"], shown["code"]) == ("refused", "flavor.unknown")


@on_virtual_time
async def test_what_was_accepted_is_printed_though_nobody_answers_any_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `--wait`: the id of an action on record was told to nobody."""
    sent: list[str] = []

    class Away:
        async def show_build(self, uuid: str) -> BuildRecord:
            if sent:
                raise ApiUnavailable("nothing answers")
            return BuildRecord(instance_uuid=uuid, project_id="p", flavor="f", state=BuildState.ACTIVE)

        async def create_action(self, uuid: str, body: Mapping[str, Any]) -> None:
            sent.append(body["request_id"])

        async def show_action(self, request_id: str) -> ActionRecord:
            raise ApiUnavailable("nothing answers")

        async def delete_build(self, uuid: str) -> None:
            sent.append(uuid)

    answered_by(monkeypatch, Away(), actions, several)
    with pytest.raises(ApiUnavailable):
        await actions.start(CONTEXT, UUID, request=actions.RequestOptions(wait=True, timeout=5.0))
    assert sent[0] in capsys.readouterr().out
    sent.clear()
    with pytest.raises(ApiUnavailable):
        await several.delete(CONTEXT, [UUID], wait=True, timeout_s=5.0, yes=True, choice=several.InstanceChoice())
    assert sent == [UUID] and UUID in capsys.readouterr().out


@pytest.mark.parametrize(("ends_at_s", "status"), [(5.0, 0), (50.0, common.Exit.TIME)])
@on_virtual_time
async def test_an_action_is_waited_for(monkeypatch: pytest.MonkeyPatch, ends_at_s: float, status: int) -> None:
    """Through answers that do not come, and not for longer than the caller's time."""
    clock = SystemClock()
    begun = clock.monotonic()

    class Acting:
        kinds: dict[str, ActionKind] = {}

        async def show_build(self, uuid: str) -> BuildRecord:
            return BuildRecord(instance_uuid=uuid, project_id="p", flavor="f", state=BuildState.ACTIVE)

        async def create_action(self, uuid: str, body: Mapping[str, Any]) -> None:
            self.kinds[body["request_id"]] = ActionKind(body["kind"])

        async def show_action(self, request_id: str) -> ActionRecord:
            passed_s = clock.monotonic() - begun
            if 1.0 < passed_s < 3.0:
                raise ApiProblem(504, "request.timeout", "no scheduler answers")
            is_over = passed_s >= ends_at_s
            state = ActionState.DONE if is_over else ActionState.ACCEPTED
            of = {"request_id": request_id, "instance_uuid": UUID, "project_id": "p", "kind": self.kinds[request_id]}
            return ActionRecord(state=state, terminal=is_over, **of)

    answered_by(monkeypatch, Acting(), actions)
    start = actions.start(CONTEXT, UUID, request=actions.RequestOptions(wait=True, timeout=20.0))
    if status:
        with pytest.raises(Stop) as stop:
            await start
        assert stop.value.status == status
    else:
        assert await start == 0
