"""What each notification means, Nova's rules, and every recording through both."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from bus.service.environment import Environment
from bus.service.settings import SettingsError
from bus.transport import BusUnavailable
from compute_sim.ironic_stand_in.announcer import AmqpAnnouncer
from ironic_sync.app import build
from ironic_sync.config import IronicSyncConfig
from ironic_sync.domain.effect import NO_EFFECT, Effect, effect_of
from ironic_sync.domain.node import Node, Unreadable, parse_node
from ironic_sync.domain.notification import MAX_BODY_BYTES, Notification, Rejected, parse
from ironic_sync.domain.rules import NO_CLASS, class_name, frees_more, is_transient, place, reserve_all
from tests.kit.cases import nightly
from tests.unit.ironic_sync.world import RECORDINGS, SCENARIOS, TOKEN, RecordedSource, Recording, World, body, world

# --- hostile input, and what each event means


UUID = "8296eb22-b44b-4cba-95b1-3a66b31189a4"
OTHER = "05dcdb28-1788-4480-9281-af335fc32c9f"


def read(event: str, **data: Any) -> Notification:
    parsed = parse(body(event, {"uuid": UUID, **data}))
    assert isinstance(parsed, Notification), parsed
    return parsed


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_recorded_message_is_understood(name: str) -> None:
    for messages in Recording(name).messages:
        for recorded, _ in messages:
            assert isinstance(parse(recorded), Notification)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (b"", "notification.malformed"),
        (b"\xff\xfe", "notification.malformed"),
        (b"{}", "notification.not_oslo"),
        (b"[]", "notification.not_oslo"),
        (b'{"a":' + b"[" * 100_000, "notification.malformed"),
        (b'{"oslo.version": "1.0", "oslo.message": "{}"}', "notification.version"),
        (b'{"oslo.version": "2.0", "oslo.message": {}}', "notification.not_oslo"),
        (b'{"oslo.version": "2.0", "oslo.message": "nope"}', "notification.malformed"),
        (b'{"oslo.version": "2.0", "oslo.message": "{}"}', "notification.invalid"),
        (b" " * (MAX_BODY_BYTES + 1), "notification.too_large"),
        (body("node.update.end", {"uuid": "../../x"}), "notification.invalid"),
        (body("node.update.end", {"uuid": UUID, "maintenance": "yes"}), "notification.invalid"),
        (body("node.update.end", {"uuid": UUID, "provision_state": 7}), "notification.invalid"),
        (body("node.update.end", {"uuid": UUID, "provision_state": "active\0"}), "notification.invalid"),
        (body("node.update", {"uuid": UUID}), "notification.unknown_event"),
        (body("node.update.maybe", {"uuid": UUID}), "notification.unknown_event"),
        (body("x", {"uuid": UUID}, event_type="compute.instance.create.end"), "notification.unknown_event"),
    ],
)
def test_what_is_no_notification_gets_a_code(given: bytes, code: str) -> None:
    rejected = parse(given)
    assert isinstance(rejected, Rejected)
    assert rejected.code == code
    assert TOKEN not in rejected.reason


def test_a_rejected_one_keeps_its_request_id() -> None:
    rejected = parse(body("node.update.end", {"uuid": 5}))
    assert isinstance(rejected, Rejected)
    assert rejected.request_id == "req-1"


@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: body(text, {})))
def test_no_bytes_raise(given: bytes) -> None:
    assert isinstance(parse(given), Notification | Rejected)


RESERVED = Effect(read=UUID, reserve_all=True)
DELETED = Effect(read=UUID, reserve_all=True, deleted=True)
LOOK = Effect(read=UUID)
LATER = Effect(read=UUID, announced=True)
FREE = {"provision_state": "available", "power_state": "power off", "maintenance": False, "instance_uuid": None}


@pytest.mark.parametrize(
    ("event", "data", "means"),
    [
        ("node.maintenance_set.end", {**FREE, "maintenance": True}, RESERVED),
        ("node.maintenance_set.start", {**FREE, "maintenance": True}, LATER),
        ("node.maintenance_set.error", {**FREE, "maintenance": True}, LOOK),
        ("node.maintenance_set.end", FREE, LOOK),
        ("node.update.end", {**FREE, "instance_uuid": OTHER}, RESERVED),
        ("node.update.start", {**FREE, "instance_uuid": OTHER}, LATER),
        ("node.update.error", {**FREE, "instance_uuid": OTHER}, LOOK),
        ("node.provision_set.start", {**FREE, "provision_state": "deploying"}, RESERVED),
        ("node.provision_set.error", {**FREE, "provision_state": "clean failed"}, RESERVED),
        ("node.provision_set.success", {**FREE, "provision_state": "manageable"}, RESERVED),
        ("node.provision_set.end", FREE, LOOK),
        ("node.provision_set.end", {**FREE, "provision_state": "a state of tomorrow"}, RESERVED),
        ("node.power_state_corrected.success", {**FREE, "power_state": None}, RESERVED),
        ("node.power_set.error", {**FREE, "power_state": "error"}, LOOK),
        ("node.delete.end", FREE, DELETED),
        ("node.delete.start", FREE, LATER),
        ("node.delete.error", FREE, LOOK),
        ("node.create.end", {}, LOOK),
        ("port.update.end", {"uuid": OTHER, "node_uuid": UUID}, LOOK),
        ("allocation.delete.end", {"uuid": OTHER, "node_uuid": UUID}, LOOK),
        ("allocation.create.end", {"uuid": OTHER, "node_uuid": None}, Effect(allocation=OTHER)),
        ("allocation.create.start", {"uuid": OTHER, "node_uuid": None}, NO_EFFECT),
        ("allocation.delete.end", {"uuid": OTHER, "node_uuid": None}, NO_EFFECT),
        ("chassis.create.end", {"uuid": OTHER}, NO_EFFECT),
        ("node.update.end", {"uuid": None}, NO_EFFECT),
    ],
)
def test_effect(event: str, data: dict[str, Any], means: Effect) -> None:
    assert effect_of(read(event, **data)) == means


def test_what_is_older_than_the_last_read_only_requests_a_read() -> None:
    """17-stale-and-refused: a traits PUT announces `cleaning` after `available`."""
    stale = read("node.update.end", **{**FREE, "provision_state": "cleaning"}, updated_at="2026-11-20T07:47:10Z")
    assert effect_of(stale, seen_updated_at="2026-11-20T07:47:13.822991+00:00") == LOOK
    assert effect_of(stale, seen_updated_at="2026-11-20T07:47:10.822991+00:00") == RESERVED, "within a second: in doubt"
    assert effect_of(stale, seen_updated_at=None) == RESERVED


async def test_no_body_is_ever_logged() -> None:
    """The live token in a body reaches no log line, whatever is wrong with the message."""
    with structlog.testing.capture_logs() as lines:
        async with World(RecordedSource([])).running() as world:
            await world.settle()
            for wrong in ({"uuid": TOKEN}, {"uuid": UUID, "maintenance": TOKEN}, {"uuid": UUID}):
                for event in ("node.update.end", f"node.{TOKEN}.end", "allocation.create.end"):
                    await world.notify(body(event, wrong))
            await world.notify(TOKEN.encode())
            await world.settle()
    assert [line for line in lines if line["event"] == "ironic.rejected"]
    assert not [line for line in lines if TOKEN in json.dumps(line, default=str)]


# --- nova's rules, against what Nova's own code answered


RULES: dict[str, Any] = json.loads((RECORDINGS / "nova-rules.json").read_text())
INSTANCE = "11111111-2222-4333-8444-555555555555"


def node(**fields: Any) -> Node:
    free = {"provision_state": "available", "power_state": "power off", "maintenance": False, "resource_class": "x"}
    parsed = parse_node({"uuid": UUID, **free, **fields})
    assert isinstance(parsed, Node)
    return parsed


@pytest.mark.parametrize("state", RULES["by provision_state"])
def test_reserved_as_in_nova(state: str) -> None:
    for maintenance, power, used, total, reserved in RULES["by provision_state"][state]:
        given = node(
            provision_state=None if state == "None" else state,
            maintenance=maintenance,
            power_state=power,
            instance_uuid=INSTANCE if used else None,
        )
        (inventory,) = place(given, None).report.inventories.values()
        assert (inventory.total, inventory.reserved) == (total, reserved), given


# Deviations from Nova on purpose, with the reason: see docs/operate/bare-metal.md.
DEVIATIONS = {"CUSTOM_GOLD": "CUSTOM_GOLD"}


@pytest.mark.parametrize("given", RULES["resource class names"])
def test_class_names_as_nova_makes_them(given: str) -> None:
    assert class_name(given) == DEVIATIONS.get(given, RULES["resource class names"][given])


def test_the_deviation_is_one() -> None:
    assert RULES["resource class names"]["CUSTOM_GOLD"] == "CUSTOM_CUSTOM_GOLD"
    assert class_name("custom-gold") == "CUSTOM_GOLD"
    assert class_name("CUSTOM_") == "CUSTOM_CUSTOM_"


@pytest.mark.parametrize("given", ["", "---", "x" * 250])
def test_what_is_no_class_is_reported(given: str) -> None:
    placed = place(node(resource_class=given), None)
    assert (placed.problem, placed.report.inventories) == (NO_CLASS, {})


def test_without_class_the_provider_stays_as_it_was_but_never_on_offer_while_unusable() -> None:
    before = place(node(traits=["CUSTOM_A"]), None).report
    assert place(node(resource_class=None), before).report is before
    held = place(node(resource_class=None, maintenance=True), before).report
    assert [inventory.reserved for inventory in held.inventories.values()] == [1]
    assert place(node(resource_class=None), held).report is held, "nothing gives back what has no class"


def test_withdraws_and_offers_again() -> None:
    free = place(node(), None).report
    held = reserve_all(free)
    assert reserve_all(held) is held
    assert frees_more(free, held) and frees_more(free, None)
    assert not frees_more(held, free) and not frees_more(free, free)


def test_unknown_states_are_transient_and_unavailable() -> None:
    assert is_transient("clean hold") and is_transient("a state of tomorrow") and is_transient("wait call-back")
    assert not is_transient("available") and not is_transient(None)


@pytest.mark.parametrize(
    "raw",
    [
        None,
        [],
        {},
        {"uuid": 1},
        {"uuid": "not a uuid"},
        {"uuid": UUID, "maintenance": "yes"},
        {"uuid": UUID, "traits": "CUSTOM_A"},
        {"uuid": UUID, "traits": ["lower"]},
        {"uuid": UUID, "provision_state": {}},
        {"uuid": UUID, "resource_class": "x" * 10_000},
    ],
)
def test_a_node_that_is_none_is_a_value(raw: object) -> None:
    assert isinstance(parse_node(raw), Unreadable)


# --- every step of every recording ends in the inventory that Nova's own code would make of the node


Messages = list[tuple[bytes, str]]


def wrong(world: World, expected: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """{node: (held, expected)} where they differ. A node that Nova cannot place keeps the provider it had."""
    differ = {}
    for uuid, answer in expected["nodes"].items():
        held, should = world.placement.seen(uuid), answer
        if answer is not None and "error" in answer:
            assert world.loop.problems()[uuid] == NO_CLASS
            should = before.get(uuid)
        if held != should:
            differ[uuid] = (held, should)
    return differ


def assert_no_accidental_offer(world: World, since: int, expected: dict[str, Any], before: dict[str, Any]) -> None:
    """Whatever was published while Ironic stood at this step, it never offered a node that was not free then."""
    for update in world.placement.updates[since:]:
        for report in update.providers:
            should = expected["nodes"].get(report.uuid)
            should = before.get(report.uuid) if should is not None and "error" in should else should
            if any(inventory.reserved == 0 for inventory in report.inventories.values()):
                assert should is not None and should["reserved"] == 0, (expected["step"], report)


def state_after(world: World, expected: dict[str, Any]) -> dict[str, Any]:
    return {uuid: world.placement.seen(uuid) for uuid in expected["nodes"]}


async def play(recording: Recording, disturb: Callable[[int, Messages], Messages], *, resync: bool) -> None:
    """Step by step: Ironic moves on, its notifications arrive disturbed, everything settles, placement is right."""
    world = World(recording.source, absent_retention_s=0.0)  # as Nova, which removes what Ironic does not show
    before: dict[str, Any] = {}
    async with world.running():
        for index, expected in enumerate(recording.expected):
            recording.source.go_to(index)
            updates_before = len(world.placement.updates)
            for body, key in disturb(index, recording.messages[index]):
                await world.notify(body, key)
            await world.settle()
            # A second "start:" brings a node whose making was not recorded: nothing but reading all can find it.
            if resync or (index and expected["step"].startswith("start:")):
                world.loop.read_all()
                await world.settle()
            assert wrong(world, expected, before) == {}, expected["step"]
            assert_no_accidental_offer(world, updates_before, expected, before)
            before = state_after(world, expected)


def test_there_are_recordings() -> None:
    assert len(SCENARIOS) == 23


@pytest.mark.parametrize("name", SCENARIOS)
async def test_each_step_as_it_was(name: str) -> None:
    await play(Recording(name), lambda _, messages: messages, resync=False)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_each_step_with_every_message_twice(name: str) -> None:
    await play(Recording(name), lambda _, messages: [m for m in messages for _ in range(2)], resync=False)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("seed", [0, *nightly(1, 2)])
async def test_each_step_in_any_order(name: str, seed: int) -> None:
    """No order is promised between publishers, hardly any within one; a read settles it."""
    rng = random.Random(seed)

    def shuffled(_: int, messages: Messages) -> Messages:
        return rng.sample(messages, len(messages))

    await play(Recording(name), shuffled, resync=False)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_each_step_with_all_earlier_messages_again(name: str) -> None:
    """Late and doubled: whatever was ever published comes back after what is true now."""
    recording = Recording(name)
    published: Messages = []

    def late(_: int, messages: Messages) -> Messages:
        published.extend(messages)
        return [*messages, *published]

    await play(recording, late, resync=False)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_each_step_with_any_one_message_lost(name: str) -> None:
    """Each message lost in turn: the periodic read repairs it."""
    recording = Recording(name)
    for index, messages in enumerate(recording.messages):
        for lost in range(len(messages)):
            await play(
                recording,
                lambda i, m, index=index, lost=lost: m[:lost] + m[lost + 1 :] if i == index else m,
                resync=True,
            )


@pytest.mark.parametrize("name", SCENARIOS)
async def test_without_any_message(name: str) -> None:
    await play(Recording(name), lambda _, __: [], resync=True)


@pytest.mark.parametrize("name", SCENARIOS)
async def test_one_step_behind(name: str) -> None:
    """Each step's messages arrive only when Ironic has moved on by one step."""
    recording = Recording(name)

    def behind(index: int, _: Messages) -> Messages:
        return recording.messages[index - 1] if index else []

    await play(recording, behind, resync=True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_wire_bytes_are_the_recorded_ones(name: str) -> None:
    for messages in Recording(name).messages:
        for sent, _ in messages:
            assert set(json.loads(sent)) == {"oslo.version", "oslo.message"}


# --- the simulated Ironic's connection to a broker


async def test_a_broker_out_of_reach_is_a_fault_with_a_sentence() -> None:
    """`berth up --processes` beside a broker that was down ended with a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    announcer = AmqpAnnouncer(f"amqp://berth:secret@127.0.0.1:{port}/berth")
    with pytest.raises(BusUnavailable, match="the simulated Ironic cannot announce") as caught:
        await announcer.open()
    assert "secret" not in str(caught.value)


# --- which cell serves the nodes: the setting goes with every update, and an unknown name ends at once


@pytest.mark.parametrize(("cell", "expected"), [("cell1", "cell1"), ("", None)])
async def test_every_update_names_the_cell_of_the_node(cell: str, expected: str | None) -> None:
    _, here = world(cell=cell)
    async with here.running():
        await here.settle()
        assert {update.cell for update in here.placement.updates} == {expected}


def test_an_unknown_cell_is_an_error() -> None:
    """Its nodes would be open to no cell."""

    def no_bus(name: str) -> None:
        raise AssertionError(name)

    env = Environment("p", transports=no_bus, cells=("cell1", "cell2"))  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match="no cell 'cell3'; the settings know cell1, cell2"):
        build(env, IronicSyncConfig(cell="cell3"))
