"""What the pages make of hosts, builds, changes and answers that do not come: pure functions, and the last answers."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import msgspec
import pytest

from berth.change_log import FieldChange, describe_change
from berth.web.application import NAV
from berth.web.pages.figures import (
    EMPTIEST,
    FULLEST,
    NOT_WELL,
    MetalClass,
    capacity_of,
    failures_of,
    is_bare_metal,
    metal_of,
    ordered,
    state_of,
    states_of,
    wanted,
    why_of,
)
from berth.web.pages.login import page_of
from berth.web.pages.object_pages import FORMS, filled
from berth.web.problems import Problem
from berth.web.rendering import MAX_KEPT, SILENT_FOR_S, TEMPLATES, Asked, LastAnswers
from berth.web.sign_in_sessions import WebCaller, WebRole
from bus.clock import SystemClock
from bus.contracts.build import BuildRecord, BuildState, HostRecord
from bus.contracts.objects import (
    Aggregate,
    CellBus,
    CellDecision,
    Flavor,
    GroupDefinition,
    ObjectKind,
    ObjectLogEntry,
    ProjectQuota,
    SchedulingRules,
)
from bus.contracts.operations import AdminState, HostAdminState
from bus.faults import RequestRefused, RequestTimeout

UUIDS = [f"10000000-0000-4000-8000-00000000000{n}" for n in range(10)]


def host(number: int = 0, **fields: Any) -> HostRecord:
    given = {"name": f"h{number}", "cell": "c1", "service": "s1", "up": True, "resources": {"VCPU": (1.0, 4.0)}}
    return HostRecord(uuid=UUIDS[number], **{**given, **fields})


def decided(state: AdminState, **fields: Any) -> HostAdminState:
    return HostAdminState(host_uuid=UUIDS[0], host="h0", state=state, by="ann", **fields)


@pytest.mark.parametrize(
    ("found", "state", "why"),
    [
        (host(), "up", ""),
        (host(up=False), "down", "its compute service s1 is silent"),
        (host(reported=False), "not reported", "by no compute service since the scheduler's start"),
        (host(not_in_placement="no inventory"), "not in placement", "no inventory"),
        (host(enabled=False), "disabled", "by its compute service"),
        (host(enabled=False, admin=decided(AdminState.DISABLED, reason="fan")), "disabled", "by ann: fan"),
        (host(enabled=False, admin=decided(AdminState.MAINTENANCE)), "maintenance", "by ann"),
        (host(up=False, enabled=False, admin=decided(AdminState.FENCED, reason="PSU")), "fenced", "by ann: PSU"),
        (host(reported=False, admin=decided(AdminState.FENCED)), "fenced", "by ann"),
    ],
)
def test_a_host_has_one_state_and_its_reason(found: HostRecord, state: str, why: str) -> None:
    assert (state_of(found), why_of(found)) == (state, why)


def test_bare_metal_is_counted_by_its_classes_and_not_as_capacity() -> None:
    metal = [
        host(1, resources={"CUSTOM_BAREMETAL_GOLD": (0.0, 1.0)}),
        host(2, resources={"CUSTOM_BAREMETAL_GOLD": (1.0, 1.0)}),
        host(3, resources={"CUSTOM_BAREMETAL_GOLD": (0.0, 0.0)}),
        host(4, resources={"CUSTOM_BAREMETAL_GOLD": (0.0, 1.0)}, up=False),
    ]
    hosts = [host(), host(5, resources={"VCPU": (3.0, 4.0), "CUSTOM_LICENCE": (0.0, 2.0)}), *metal]
    assert [is_bare_metal(one) for one in hosts] == [False, False, True, True, True, True]
    assert metal_of(hosts) == [MetalClass("CUSTOM_BAREMETAL_GOLD", free=1, used=1, held=2)]
    assert [(one.name, one.used, one.total) for one in capacity_of(hosts)] == [
        ("VCPU", 4.0, 8.0), ("CUSTOM_LICENCE", 0.0, 2.0),
    ]  # fmt: skip


def test_hosts_are_filtered_by_state_and_put_in_order() -> None:
    hosts = [host(0, resources={"VCPU": (used, 4.0)}) for used in (1.0,)]
    hosts += [host(1, resources={"VCPU": (4.0, 4.0)}), host(2, up=False), host(3, enabled=False)]
    assert list(states_of(hosts).items()) == [("down", 1), ("disabled", 1), ("up", 2)]
    assert [one.name for one in wanted(hosts, {"state": NOT_WELL})] == ["h2", "h3"]
    assert [one.name for one in wanted(hosts, {"state": "up", "q": "1"})] == ["h1"]
    assert [one.name for one in ordered(hosts, FULLEST)] == ["h1", "h0", "h2", "h3"]
    assert [one.name for one in ordered(hosts, EMPTIEST)] == ["h0", "h2", "h3", "h1"]


def test_failures_are_grouped_by_their_code_with_their_flavors() -> None:
    def failed(number: int, code: str, flavor: str) -> BuildRecord:
        fields = {"instance_uuid": UUIDS[number], "project_id": "p", "code": code, "reason": f"r{number}"}
        return BuildRecord(**fields, flavor=flavor, state=BuildState.FAILED, updated_at=float(number))  # type: ignore[arg-type]

    groups = failures_of(
        [failed(1, "full", "a"), failed(2, "full", "b"), failed(3, "odd", "a"), failed(4, "full", "b")]
    )
    assert [(one.code, one.count, one.flavors, one.reason) for one in groups] == [
        ("full", 3, {"b": 2, "a": 1}, "r4"), ("odd", 1, {"a": 1}, "r3"),
    ]  # fmt: skip


# --- without a scheduler


class HandClock(SystemClock):
    now = 100.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


async def answer(value: str) -> str:
    return value


async def silence() -> str:
    raise RequestTimeout("no reply")


async def ask(last: LastAnswers, made: Coroutine[Any, Any, str], caller: WebCaller | None = None) -> tuple[str, Asked]:
    asked = Asked(last, caller)
    return await asked.of(made, without="not known", question="q"), asked


async def test_the_last_answer_stands_in_for_one_that_does_not_come() -> None:
    last = LastAnswers(clock := HandClock())
    assert await (first := Asked(last)).of(silence(), without="not known", question="q") == "not known"
    assert first.status == 504 and first.as_of is None
    clock.now += 60
    assert (await ask(last, answer("hosts")))[0] == "hosts"
    clock.now += 60
    shown, asked = await ask(last, silence())
    assert (shown, asked.status, asked.as_of) == ("hosts", 504, 160.0)
    assert await Asked(last).of(answer("4 dead letters"), without="", by_others=True) == "4 dead letters"


async def test_pages_do_not_wait_one_after_the_other_while_no_scheduler_answers() -> None:
    last, waited = LastAnswers(clock := HandClock()), 0

    async def wait_in_vain() -> str:
        nonlocal waited
        waited += 1
        return await silence()

    for _ in range(3):
        assert (await ask(last, wait_in_vain()))[1].status == 504
    assert waited == 1
    clock.now += SILENT_FOR_S + 1
    assert (await ask(last, answer("hosts")))[0] == "hosts", "it is asked again"
    assert (await ask(last, wait_in_vain()))[0] == "hosts" and waited == 2


async def test_a_project_is_not_shown_what_another_was_answered() -> None:
    last = LastAnswers(HandClock())
    callers = [WebCaller(name=name, role=WebRole.PROJECT, project=name) for name in ("a", "b")]
    await ask(last, answer("of a"), callers[0])
    assert [(await ask(last, silence(), one))[0] for one in (*callers, None)] == ["of a", "not known", "not known"]


async def test_a_refusal_is_no_missing_answer() -> None:
    async def refuse() -> str:
        raise RequestRefused("no", code="host.unknown")

    last = LastAnswers(HandClock())
    await ask(last, answer("hosts"))
    with pytest.raises(RequestRefused):
        await ask(last, refuse())
    with pytest.raises(Problem):
        await ask(last, missing())


async def missing() -> str:
    raise Problem(404, "host.unknown", "no")


def test_the_last_answers_are_bounded() -> None:
    last = LastAnswers(HandClock())
    for number in range(MAX_KEPT + 2):
        last.keep(number, number)
    assert last.find(1) is None and last.find(2) == (100.0, 2) and last.find(MAX_KEPT + 1) is not None


@pytest.mark.parametrize(
    ("address", "leads_to"),
    [
        ("/fleet?cell=c1", "/fleet?cell=c1"),
        ("", ""),
        ("https://evil.example/", ""),
        ("//evil.example/", ""),
        ("/\\evil.example/", ""),
        ("/\t/evil.example/", ""),
        ("/login?next=/login", ""),
        ("/" + "x" * 3000, ""),
        ("/\u202e", ""),
    ],
)
def test_a_link_to_the_login_page_leads_to_pages_of_this_server_alone(address: str, leads_to: str) -> None:
    assert page_of(address) == leads_to


# --- objects


MESSAGES = {
    ObjectKind.FLAVOR: Flavor,
    ObjectKind.AGGREGATE: Aggregate,
    ObjectKind.QUOTA: ProjectQuota,
    ObjectKind.GROUP: GroupDefinition,
    ObjectKind.SCHEDULING: SchedulingRules,
    ObjectKind.CELL: CellDecision,
}


@pytest.mark.parametrize("kind", FORMS)
def test_a_form_has_each_field_of_its_message(kind: ObjectKind) -> None:
    """A field that a form lacks would be lost by a change that was made with it."""
    fields = {one.name for one in msgspec.structs.fields(MESSAGES[kind])} - {"name"}
    if kind is ObjectKind.CELL:
        fields = (fields - {"bus"}) | {f"bus.{one.name}" for one in msgspec.structs.fields(CellBus)}
    assert {one.name for one in FORMS[kind]} == fields


def test_a_form_is_filled_so_that_its_script_can_read_it_back() -> None:
    body = {"metadata": {"a=b": "x", "plain": "two words"}, "hosts": ["h1", "\u202eh2"], "uuid": ' "q"'}
    values = {one.field.name: (one.value, one.given) for one in filled(ObjectKind.AGGREGATE, body)}
    assert values == {
        "uuid": ('" \\"q\\""', True),
        "metadata": ('"a=b" = x\nplain = two words', True),
        "hosts": ('h1\n"\\u202eh2"', True),
    }
    empty = {one.field.name: one.given for one in filled(ObjectKind.AGGREGATE, {"uuid": "u"})}
    assert empty == {"uuid": True, "metadata": False, "hosts": False}


def entry(kind: ObjectKind, before: Any, after: Any, **fields: Any) -> ObjectLogEntry:
    return ObjectLogEntry(kind=kind, name="n", before=before, after=after, revision=3, at=5.0, actor="ann", **fields)


@pytest.mark.parametrize(
    ("found", "words", "changes"),
    [
        (
            entry(ObjectKind.FLAVOR, {"vcpus": 2, "extra_specs": {"a": "1"}}, {"vcpus": 4, "extra_specs": {}}),
            ("changed", "flavor", "n"),
            (FieldChange("extra_specs a", "1", ""), FieldChange("vcpus", "2", "4")),
        ),
        (entry(ObjectKind.QUOTA, {"limits": {}}, None), ("deleted", "the quota of", "n"), ()),
        (
            entry(ObjectKind.HOST, None, {"host": "h1", "state": "fenced", "reason": "PSU"}),
            ("fenced", "host", "h1"),
            (),
        ),
        (
            entry(
                ObjectKind.FENCE,
                {"host": "h1", "token": "s3cret", "version": 2},
                {"host": "h1", "token": "s3cret", "version": 2, "acknowledged": 2},
            ),
            ("acknowledged", "the fence of host", "h1"),
            (),
        ),
        (
            entry(ObjectKind.DRAIN, None, {"name": "h1", "target": "host", "kind": "migrate", "at_once": 2}),
            ("started", "the drain of", "host h1"),
            (FieldChange("at_once", "", "2"), FieldChange("kind", "", "migrate")),
        ),
        (entry(ObjectKind.SCHEDULING, {}, {}), ("changed", "the", "scheduling rules"), ()),
    ],
)
def test_the_log_reads_as_sentences(
    found: ObjectLogEntry, words: tuple[str, str, str], changes: tuple[FieldChange, ...]
) -> None:
    described = describe_change(found)
    assert (described.verb, described.noun, described.name) == words
    assert described.changes == changes


def test_a_describe_change_a_large_object_is_short() -> None:
    described = describe_change(entry(ObjectKind.AGGREGATE, None, {"hosts": [f"host{n}" for n in range(1000)]}))
    assert len(described.changes[0].after) < 200 and "994 more" in described.changes[0].after


# --- the frame


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/", "Overview"),
        ("/builds/x", "Instances"),
        ("/fleet/x/drain", "Fleet"),
        ("/metal", "Fleet"),
        ("/drains/x", "Operations"),
        ("/dead-letters/api/q", "Operations"),
        ("/objects/log", "Objects"),
        ("/system", "System"),
    ],
)
def test_each_page_is_in_one_part(path: str, name: str) -> None:
    assert [one.name for one in NAV if one.has(path) and WebRole.OPERATOR in one.roles] == [name]


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        ((512, "MEMORY_MB"), "512 MiB"),
        ((261632, "MEMORY_MB"), "256 GiB"),
        ((1000, "DISK_GB"), "0.977 TiB"),
        ((999, "DISK_GB"), "999 GiB"),
        ((64512.0, "VCPU"), "64,512"),
        ((0.5, "VCPU"), "0.5"),
    ],
)
def test_amounts_are_in_units_of_a_person(amount: tuple[float, str], shown: str) -> None:
    assert TEMPLATES.filters["size"](*amount) == shown


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.0, "0 %"), (0.0156, "under 0.1 %"), (1.25, "1.2 %"), (40.0, "40 %"), (99.97, "over 99.9 %"), (100.0, "100 %")],
)
def test_a_share_is_never_said_to_be_nothing_or_all_that_is_not(share: float, words: str) -> None:
    assert TEMPLATES.filters["percent"](share) == words
