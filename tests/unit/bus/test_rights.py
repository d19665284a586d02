"""Who may send what: keys and whether they are trusted, lanes of projects, rights, bounds of deploys."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import wire
from bus.consuming import in_flight
from bus.consuming.in_flight import ArrivedDelivery, ConsumerLane, LanesInTurn
from bus.contracts.base import Message, Meta
from bus.contracts.build import BuildRequest, DeleteRequest, FlavorCount
from bus.contracts.catalogue import (
    BY_TYPE,
    MESSAGES,
    OF_PROJECT,
    OPERATORS,
    destination,
    operators_rights,
    projects_key,
    routing_key,
)
from bus.contracts.deploy import MAX_NETWORK_DATA, MAX_USER_DATA, ConfigDrive
from bus.contracts.moves import MoveKind, MoveRequest
from bus.contracts.queues import BY_QUEUE, COMMANDS, LANES, QueueKind, QueueRow, lane_of
from bus.gather import InTurn
from bus.key_trust import BROKERS_OWN, letters_code, letters_key, published_key
from bus.port import UNREAD, Delivery, Outgoing
from bus.topology import matches, plan
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.domain.decisions import instance_spec
from tests.unit.bus.test_wire import UUID, Arrived

# --- An operator's rights: one table, which every door goes by.


BUILD = {"instance_uuid": UUID, "flavor": "m1.small", "project_id": "p"}
MOVE = {"request_id": UUID, "instance_uuid": UUID, "project_id": "p"}
# Every field of each message that a project publishes, by whose right it is. A field that is new has to be put here.
FIELDS_OF_PROJECT = {
    "build.request.v1": {
        "instance_uuid", "flavor", "project_id", "user_id", "name", "image", "availability_zone", "ignore_hosts",
        "max_attempts", "build_timeout_s", "server_group", "group", "different_host", "same_host", "image_properties",
        "config_drive", "networks", "on_host_failure", "count", "also", "min_count",
    },
    "build.delete.v1": {"instance_uuid", "project_id"},
    "instance.move.v1": {
        "request_id", "instance_uuid", "project_id", "user_id", "flavor", "image", "image_properties", "ignore_hosts",
        "max_attempts", "policy", "migration", "auto_confirm_s", "offload", "rescue_password", "timeout_s",
    },
}  # fmt: skip
OPERATORS_OWN: list[tuple[type[Message], dict[str, Any]]] = [
    (BuildRequest, {**BUILD, "host": "h1"}),
    (BuildRequest, {**BUILD, "host": "h1", "forced": True}),
    (BuildRequest, {**BUILD, "image_source": {"source": "http://169.254.169.254/latest/"}}),
    (BuildRequest, {**BUILD, "image_source": {"source": "file:///etc/ironic/ironic.conf"}}),
    (BuildRequest, {**BUILD, "volumes": [{"volume_id": "v", "properties": {"target_portal": "10.0.0.1:3260"}}]}),
    (MoveRequest, {**MOVE, "kind": "rebuild", "image": "i", "image_source": {"source": "http://10.0.0.1:8500/"}}),
    (MoveRequest, {**MOVE, "kind": "revert", "force": True}),
    (MoveRequest, {**MOVE, "kind": "evacuate"}),
    (MoveRequest, {**MOVE, "kind": "evacuate", "fenced": True, "force": True}),
    (MoveRequest, {**MOVE, "kind": "migrate"}),
    (MoveRequest, {**MOVE, "kind": "live-migrate"}),
    (MoveRequest, {**MOVE, "kind": "resize", "flavor": "m1.large", "host": "h1"}),
    (MoveRequest, {**MOVE, "kind": "unshelve", "host": "h1", "forced": True}),
]
PROJECTS_OWN: list[tuple[type[Message], dict[str, Any]]] = [
    (BuildRequest, BUILD),
    (BuildRequest, {**BUILD, "count": 3, "min_count": 1, "ignore_hosts": ["h1"]}),
    (BuildRequest, {**BUILD, "image": "debian-12", "networks": [{"network": UUID}, {"port": UUID}]}),
    (MoveRequest, {**MOVE, "kind": "rebuild", "image": "debian-12"}),
    (MoveRequest, {**MOVE, "kind": "revert"}),
    (MoveRequest, {**MOVE, "kind": "confirm"}),
    (MoveRequest, {**MOVE, "kind": "resize", "flavor": "m1.large"}),
    (MoveRequest, {**MOVE, "kind": "revert", "force": False}),
]


def codec() -> wire.Codec:
    from bus.contracts.catalogue import taken_by  # noqa: PLC0415

    return wire.Codec([row.message for row in taken_by("scheduler.requests")], queue="scheduler.requests")


def body_of(kind: type[Message], fields: dict[str, Any]) -> bytes:
    return json.dumps({**fields, "type": BY_TYPE[kind].tag}).encode()


def test_every_field_of_a_projects_message_is_decided_about() -> None:
    for row in MESSAGES:
        if "client" in row.publishers:
            operators = set(OPERATORS.get(row.message, {})) - {"kind"}
            ours = FIELDS_OF_PROJECT[row.tag] | {"kind"} if row.message is MoveRequest else FIELDS_OF_PROJECT[row.tag]
            assert ours.isdisjoint(operators)
            assert set(row.message.__struct_fields__) == ours | operators, row.tag


@pytest.mark.parametrize(("kind", "fields"), OPERATORS_OWN)
@pytest.mark.parametrize("in_batch", [False, True])
def test_what_only_an_operator_may_request_is_refused_under_a_projects_key(
    kind: type[Message], fields: dict[str, Any], in_batch: bool
) -> None:
    message = msgspec.convert(fields, kind)
    packed, key = wire.pack(message, Meta(id="m")), routing_key(message)
    sent = wire.batch([packed, packed], "berth", key) if in_batch else wire.single(packed, "berth", key)
    for got in codec().read(Arrived(sent), "new"):
        assert isinstance(got, wire.Malformed)
        assert (got.code, got.key) == ("role.forbidden", key)


@pytest.mark.parametrize(("kind", "fields"), OPERATORS_OWN)
def test_an_operators_message_has_a_key_of_its_own_and_is_taken(kind: type[Message], fields: dict[str, Any]) -> None:
    message = msgspec.convert(fields, kind)
    assert destination(message) == ("berth", "operator.request.p")
    sent = wire.single(wire.pack(message, Meta(id="m")), *destination(message))
    assert codec().read(Arrived(sent), "new") == [wire.Read(message, Meta(id="m"))]


@pytest.mark.parametrize(("kind", "fields"), OPERATORS_OWN)
def test_one_that_is_replayed_from_the_dead_letters_is_read_under_its_first_key(
    kind: type[Message], fields: dict[str, Any]
) -> None:
    """An operator who replays a project's refused message does not thereby request it."""
    message = msgspec.convert(fields, kind)
    packed = wire.pack(message, Meta(id="m"))
    letter = wire.single(packed, "berth.replays", "scheduler.requests")
    letter = msgspec.structs.replace(letter, headers={"berth-key": routing_key(message)})
    (got,) = codec().read(Arrived(letter), "new")
    assert isinstance(got, wire.Malformed) and got.code == "role.forbidden"


@pytest.mark.parametrize(("kind", "fields"), PROJECTS_OWN)
def test_a_projects_own_requests_go_by_its_key(kind: type[Message], fields: dict[str, Any]) -> None:
    message = msgspec.convert(fields, kind)
    assert operators_rights(message) == ()
    assert destination(message) == ("berth", routing_key(message))
    sent = wire.single(wire.pack(message, Meta(id="m")), *destination(message))
    assert codec().read(Arrived(sent), "new") == [wire.Read(message, Meta(id="m"))]


def test_the_table_names_fields_that_there_are_and_queues_that_take_them() -> None:
    for kind, rule in OPERATORS.items():
        assert rule.keys() <= set(kind.__struct_fields__)
        required = set(kind.__struct_fields__[: len(kind.__struct_fields__) - len(kind.__struct_defaults__)])
        for field, values in rule.items():
            assert values is not None or field not in required, "a field without a default has values"
    assert BY_QUEUE["scheduler.requests"].consumer == "scheduler_worker"
    assert OPERATORS[MoveRequest]["kind"] == {MoveKind.MIGRATE, MoveKind.LIVE_MIGRATE, MoveKind.EVACUATE}


# --- Whence the routing key of a message comes, and whether it is trusted: each way by which one can arrive.


BUILD_UUID = "00000000-0000-0000-0000-000000000001"
MINE, VICTIMS = "build.delete.19.mine", "build.delete.9.victim"
TRUSTED_QUEUE = "scheduler.requests"
LANE_OF_MINE = "scheduler.requests.19"
CODEC = wire.Codec([BuildRequest, DeleteRequest], queue=TRUSTED_QUEUE)


class TrustedArrival:
    """An Outgoing as the other side sees it."""

    def __init__(self, exchange: str, key: str, headers: dict[str, Any], body: bytes = b"") -> None:
        message = Outgoing(exchange=exchange, routing_key=key, body=body)
        for name in message.__struct_fields__:
            setattr(self, name, getattr(message, name))
        self.headers = headers


def arrived(exchange: str, key: str, body: bytes = b"", **headers: Any) -> Delivery:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return TrustedArrival(exchange, key, named, body)  # type: ignore[return-value]


def death(queue: str, reason: str = "expired", exchange: str = "berth", key: str = MINE) -> dict[str, Any]:
    return {"count": 1, "queue": queue, "reason": reason, "exchange": exchange, "routing-keys": [key]}


PRIVATE = death("amq.gen-TwFY9rzBoMgsQd2aCAsNlQ", exchange="berth.events", key="build.event.refused.mine")
OWN = death(TRUSTED_QUEUE)
DELAYED = death("berth.delayed.200", exchange="berth.delay.200", key=TRUSTED_QUEUE)
FORGED = death(TRUSTED_QUEUE, key=VICTIMS)
COMMAND = "berth"
ARRIVALS: dict[str, tuple[Delivery, str | None]] = {
    "a client's": (arrived(COMMAND, MINE), MINE),
    "with a header of its own for the key": (arrived(COMMAND, MINE, berth_key=VICTIMS), MINE),
    "dead-lettered by a private queue": (arrived(COMMAND, VICTIMS, x_death=[PRIVATE]), None),
    "the same, hidden behind many headers": (arrived(COMMAND, VICTIMS, **{UNREAD: True}), None),
    "the same, with a forged second death": (arrived(COMMAND, VICTIMS, x_death=[PRIVATE, OWN]), None),
    "with a forged record": (arrived(COMMAND, MINE, x_death=[OWN]), None),
    "with half of a forged record": (arrived(COMMAND, MINE, x_first_death_queue=TRUSTED_QUEUE), None),
    "by a second key": (arrived(COMMAND, "placement.release", CC=[VICTIMS]), None),
    "by a second key, shown": (arrived(COMMAND, MINE, CC=[VICTIMS]), MINE),
    "an event's": (arrived("berth.events", "build.event.active.p"), "build.event.active.p"),
    "an event that was dead-lettered": (arrived("berth.events", "build.event.active.p", x_death=[PRIVATE]), None),
    "from another program's exchange": (arrived("ironic", "notifications.info"), None),
    "by an exchange that is bound to ours": (arrived("compute.evil", MINE), None),
    "by the default exchange": (arrived("", TRUSTED_QUEUE, berth_key=MINE), None),
    "an operator's": (arrived(COMMAND, "operator.request.p"), "operator.request.p"),
    "expired unread": (arrived("berth.given-up", MINE, x_death=[OWN]), MINE),
    "expired unread, with a forged key": (arrived("berth.given-up", MINE, x_death=[FORGED]), MINE),
    "expired unread, with a prefix": (arrived("berth.given-up", MINE, x_death=[death(f"site.{TRUSTED_QUEUE}")]), MINE),
    "a private queue's, expired unread": (arrived("berth.given-up", VICTIMS, x_death=[OWN, PRIVATE]), None),
    "the same, hidden": (arrived("berth.given-up", VICTIMS, x_death=[OWN], **{UNREAD: True}), None),
    "given up without a record": (arrived("berth.given-up", VICTIMS), None),
    "given up with no real record": (arrived("berth.given-up", VICTIMS, x_death=[True]), None),
    "given up after a delay": (arrived("berth.given-up", TRUSTED_QUEUE, x_death=[OWN, DELAYED]), ""),
    "parked by a worker": (arrived("berth.dead", TRUSTED_QUEUE, berth_key=MINE), MINE),
    "parked by a worker, key unknown": (arrived("berth.dead", TRUSTED_QUEUE), ""),
    "a worker's, given up by the broker": (
        arrived("berth.dead", "conductor.requests", x_death=[death("conductor.requests", key="cell.build")]),
        "cell.build",
    ),
    "a worker's, given up after a delay": (
        arrived("berth.dead", "conductor.requests", x_death=[death("conductor.requests"), DELAYED]),
        "",
    ),
    "a private queue's, given up by a worker's": (
        arrived("berth.dead", "placement.inventory", x_death=[death("placement.inventory"), PRIVATE]),
        None,
    ),
    "back from a delay": (arrived("berth.return", TRUSTED_QUEUE, x_death=[DELAYED], berth_key=VICTIMS), ""),
    "back from a delay, by another's exchange": (
        arrived("berth.return", TRUSTED_QUEUE, x_death=[death("berth.delayed.200", exchange="compute.evil")]),
        None,
    ),
    "back from no delay": (arrived("berth.return", TRUSTED_QUEUE), None),
    "a letter that goes back": (arrived("berth.replays", TRUSTED_QUEUE, berth_key=MINE), MINE),
    "the same, given up by the broker": (
        arrived(
            "berth.given-up",
            TRUSTED_QUEUE,
            x_death=[death(TRUSTED_QUEUE, exchange="a.berth.replays", key=f"a.{TRUSTED_QUEUE}")],
            berth_key=MINE,
        ),
        MINE,
    ),
    "a reply": (arrived("berth.replies", "berth.reply.p"), ""),
    "a reply that was dead-lettered": (arrived("berth.replies", "berth.reply.p", x_death=[PRIVATE]), None),
}


@pytest.mark.parametrize("name", ARRIVALS)
def test_the_key_of_each_arrival(name: str) -> None:
    delivery, key = ARRIVALS[name]
    lane = LANE_OF_MINE if delivery.routing_key == MINE else TRUSTED_QUEUE
    assert published_key(delivery, lane) == key


@pytest.mark.parametrize("name", sorted(BROKERS_OWN | {UNREAD}))
@pytest.mark.parametrize("body", [b"{", b'{"instance_uuid": "%s", "project_id": "victim"}' % BUILD_UUID.encode()])
def test_a_message_that_was_dead_lettered_elsewhere_is_not_read(name: str, body: bytes) -> None:
    """As a malformed request it made a `refused` in the stream of the project that its key named."""
    delivery = arrived(COMMAND, VICTIMS, body, **{name: [PRIVATE]})
    assert CODEC.read(delivery, "new") == []
    assert len(CODEC.read(arrived(COMMAND, VICTIMS, body), "new")) == 1


def test_a_retry_that_the_broker_has_delayed_is_read() -> None:
    packed = wire.pack(DeleteRequest(instance_uuid=BUILD_UUID, project_id="p"), Meta(id="m", attempt=1))
    delivery = arrived("berth.return", TRUSTED_QUEUE, packed.body, x_death=[DELAYED])
    (got,) = CODEC.read(delivery, "new")
    assert isinstance(got, wire.Read)


@pytest.mark.parametrize(
    "queue", ["placement.requests", "placement.inventory", "scheduler.changes", "scheduler.records"]
)
def test_a_second_key_opens_no_door_to_another_queue(queue: str) -> None:
    """RabbitMQ 3.10 checks a publisher's permission for the first key only."""
    assert published_key(arrived(COMMAND, MINE, CC=["x"]), queue) is None


@pytest.mark.parametrize("queue", [TRUSTED_QUEUE, "scheduler.requests.9"])
def test_a_second_key_opens_no_other_lane_and_not_that_of_operators(queue: str) -> None:
    assert published_key(arrived(COMMAND, MINE), LANE_OF_MINE) == MINE
    assert published_key(arrived(COMMAND, MINE, CC=["operator.request.p", VICTIMS]), queue) is None


@pytest.mark.parametrize(
    ("queue", "key"),
    [("compute.{service}", "compute.spawn.c1"), ("placement.inventory", f"inventory.update.{BUILD_UUID}")],
)
def test_keys_that_a_binding_takes_are_trusted(queue: str, key: str) -> None:
    assert published_key(arrived(COMMAND, key), queue) == key


def test_the_code_of_a_letter() -> None:
    assert letters_code(arrived("berth.given-up", MINE, x_death=[OWN])) == "broker.expired"
    assert letters_code(arrived("berth.dead", TRUSTED_QUEUE, berth_code="message.malformed")) == "message.malformed"
    assert letters_key(arrived("berth.given-up", VICTIMS, x_death=[OWN, PRIVATE])) is None


# --- The lanes of projects: the function, the queues, and how a consumer takes from them.


LANE_UUID = "00000000-0000-4000-8000-000000000001"
REQUESTS = BY_QUEUE["scheduler.requests"]


class Sent:
    """A delivery of a name and a number of bytes."""

    def __init__(self, name: str, size: int = 1, *, is_lost: bool = False) -> None:
        self.name = name
        self.body = b"x" * size
        self.is_lost = is_lost


class Regulated:
    """A subscription that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


def taken(of: InTurn[Sent], count: int) -> list[str]:
    return [of.take().name for _ in range(count)]


def test_a_client_in_any_language_computes_the_lane() -> None:
    """These values are part of the interface: each client has its own copy of the function."""
    assert LANES == 32
    assert {name: lane_of(name) for name in ("demo", "p", "bad", "a-b_C9")} == {
        "demo": 0,
        "p": 17,
        "bad": 27,
        "a-b_C9": 2,
    }


def test_a_projects_commands_carry_its_lane() -> None:
    commands = {
        "build.request.17.p": BuildRequest(instance_uuid=LANE_UUID, flavor="f", project_id="p"),
        "build.delete.17.p": DeleteRequest(instance_uuid=LANE_UUID, project_id="p"),
        "instance.move.17.p": MoveRequest(
            request_id=LANE_UUID, instance_uuid=LANE_UUID, project_id="p", kind=MoveKind.STOP
        ),
    }
    assert {key: routing_key(message) for key, message in commands.items()} == {key: key for key in commands}
    assert {projects_key(BY_TYPE[type(message)].key, "p") for message in commands.values()} == set(commands)


@given(st.from_regex(r"[A-Za-z0-9_\-]{1,64}", fullmatch=True))
def test_each_key_of_a_project_leads_to_the_queue_of_its_lane_alone(project: str) -> None:
    for row in MESSAGES:
        if row.exchange == COMMANDS and row.key.endswith(OF_PROJECT):
            words = projects_key(row.key, project).split(".")
            takers = [
                queue.name
                for queue in REQUESTS.queues
                if any(matches(pattern.split("."), words) for _, pattern in queue.bindings)
            ]
            assert takers == [f"scheduler.requests.{lane_of(project)}"]


def test_a_lane_is_bounded_as_the_queue_was_and_the_queue_of_the_name_is_for_no_project() -> None:
    shared, *of_lanes = (plan(queue, queue.name, queue.bindings) for queue in REQUESTS.queues)
    assert len(of_lanes) == LANES
    assert {(one.max_bytes, one.max_length, one.drop_head) for one in of_lanes} == {
        (REQUESTS.max_bytes, REQUESTS.max_length, False)
    }
    assert [key for exchange, key in shared.bindings if exchange == COMMANDS] == ["operator.request.#"]


def test_a_quiet_lane_waits_for_one_delivery_of_each_other() -> None:
    """In one line its request stood behind all that a noisy neighbour had sent before."""
    waiting = InTurn[Sent]()
    for lane in (0, 1):
        for number in range(100):
            waiting.put(lane, Sent(f"{lane}.{number}"))
    assert taken(waiting, 5) == ["0.0", "1.0", "0.1", "1.1", "0.2"]
    waiting.put(3, Sent("quiet"))
    assert "quiet" in taken(waiting, 3)
    assert len(waiting) == 193


@given(st.lists(st.integers(0, 3), max_size=60))
def test_all_are_taken_each_lane_in_its_order_and_none_twice_while_another_waits(arrivals: list[int]) -> None:
    waiting = InTurn[Sent]()
    for number, lane in enumerate(arrivals):
        waiting.put(lane, Sent(f"{lane}.{number}"))
    order = [tuple(map(int, name.split("."))) for name in taken(waiting, len(waiting))]
    for lane in range(4):
        assert [number for one, number in order if one == lane] == [
            number for number, one in enumerate(arrivals) if one == lane
        ]
    left = [arrivals.count(lane) for lane in range(4)]
    before = None
    for lane, _ in order:
        assert lane != before or sum(count > 0 for count in left) == 1
        left[lane] -= 1
        before = lane


class Lanes:
    """Lanes in turn, and what is taken of them: names, each the lane's first letter and a number."""

    def __init__(self) -> None:
        self.in_turn = LanesInTurn()
        self.lanes = {name: ConsumerLane(name) for name in "ab"}

    def put(self, lane: str, count: int) -> None:
        for number in range(count):
            sent: Any = Sent(f"{lane}{number}")
            self.in_turn.put(self.lanes[lane], ArrivedDelivery(sent, 0.0, 0.0, self.lanes[lane]))

    def take(self, count: int, **weights: int) -> str:
        """The lanes from which so many messages are taken; fewer where no lane may have more in hand."""
        order = ""
        while len(order) < count and (lane := self.in_turn.next()) is not None:
            self.in_turn.take(lane, weights.get(lane.name, 1))
            order += lane.name
        return order


def test_a_message_for_many_machines_is_as_many_turns() -> None:
    """A gang of 100, or a batch of 512, was one turn: others' boots took 5 s and 35 s."""
    many = Lanes()
    many.put("a", 2)
    many.put("b", 8)
    assert many.take(7, a=6) == "abbbbbb"
    assert many.take(3, a=6) == "abb"


def test_a_lane_that_was_empty_has_saved_up_no_turns() -> None:
    lanes = Lanes()
    lanes.put("a", 8)
    assert lanes.take(4) == "aaaa"
    lanes.put("b", 3)
    assert lanes.take(6) in ("bababa", "ababab")


def test_of_several_lanes_none_has_much_in_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "MAX_SHARED", 3)
    monkeypatch.setattr(in_flight, "SHARED_FOR", 8)
    lanes = Lanes()
    lanes.put("a", 20)
    assert lanes.take(4) == "aaaa", "alone it fills a batch"
    lanes.put("b", 1)
    assert (lanes.take(9), lanes.in_turn.has_quiet, lanes.in_turn.waiting()) == ("b", False, 0)
    lanes.lanes["a"].in_hand = 0
    assert (lanes.in_turn.has_quiet, lanes.in_turn.waiting(), lanes.take(9)) == (True, 16, "aaa")
    lanes.put("a", 1)
    assert lanes.take(99) == "", "a quiet lane's message came just now"
    lanes.lanes["a"].in_hand = -5
    assert lanes.take(99) == 14 * "a", "the quiet lane's last message is many requests ago"


def test_busy_lanes_fill_batches_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three busy projects' boots took twice the messages."""
    monkeypatch.setattr(in_flight, "MAX_SHARED", 3)
    monkeypatch.setattr(in_flight, "SHARED_FOR", 6)
    lanes = Lanes()
    lanes.put("a", 5)
    lanes.put("b", 5)
    assert lanes.take(6) == "ababab", "b was quiet"
    lanes.put("a", 1)
    lanes.put("b", 1)
    assert lanes.take(99) == "ababab", "neither was"


def test_the_lost_deliveries_of_each_lane_are_dropped() -> None:
    lanes = Lanes()
    lanes.put("a", 1)
    lanes.put("b", 2)
    for lane in "ab":
        lanes.lanes[lane].waiting[0].delivery.is_lost = True  # type: ignore[union-attr, misc]
    assert len(list(lanes.in_turn.take_first(lambda one: one.is_lost))) == 2
    assert (lanes.take(9), lanes.in_turn.waiting()) == ("b", 0)


@pytest.mark.parametrize(
    ("request_", "weight"),
    [
        (BuildRequest(instance_uuid=UUID, flavor="f", project_id="p"), 1),
        (
            BuildRequest(
                instance_uuid=UUID, flavor="f", project_id="p", count=3, also=(FlavorCount(flavor="g", count=2),)
            ),
            5,
        ),
        (DeleteRequest(instance_uuid=UUID, project_id="p"), 1),
    ],
)
def test_a_request_weighs_as_many_machines_as_it_is_for(request_: Message, weight: int) -> None:
    assert request_.weight == weight


def test_a_lane_with_many_bytes_in_hand_is_paused_until_half_of_them_are_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """512 of a megabyte were in a scheduler's memory."""
    monkeypatch.setattr(in_flight, "MAX_LANE_BYTES", 100)
    lane, subscription = ConsumerLane("q"), Regulated()
    lane.subscription = subscription  # type: ignore[assignment]
    sent: list[Any] = [Sent("x", 40) for _ in range(4)]
    for one in sent:
        lane.hold(one)
    assert (subscription.calls, lane.held) == (["pause"], 160)
    lane.release(sent[0])
    lane.release(sent[1])
    assert subscription.calls == ["pause"]
    lane.release(sent[2])
    assert (subscription.calls, lane.held) == (["pause", "resume"], 40)


# --- The requests that a client may send about a deployed machine: its bounds, and that secrets are not shown.


NODE_UUID = "20000000-0000-4000-8000-000000000000"


def parsed(**fields: object) -> BuildRequest:
    return msgspec.convert(
        {"type": "build.request.v1", "instance_uuid": NODE_UUID, "flavor": "f", "project_id": "p"} | fields,
        BuildRequest,
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"image_source": {"source": ""}},
        {"image_source": {"source": "http://a b"}},
        {"image_source": {"source": "http://a\n"}},
        {"image_source": {"source": "http://a", "hash_algorithm": "sha256"}},
        {"image_source": {"source": "http://a", "hash_value": "0" * 64}},
        {"image_source": {"source": "http://a", "hash_algorithm": "crc", "hash_value": "0" * 64}},
        {"image_source": {"source": "http://a", "format": "raw"}},
        {"config_drive": {"user_data": "x" * (MAX_USER_DATA + 1)}},
        {"config_drive": {"public_keys": ["k"] * 17}},
        {"config_drive": {"network_data": {"x": "y" * MAX_NETWORK_DATA}}},
        {"config_drive": {"hostname": "a b"}},
        {"networks": [{}]},
        {"networks": [{"port": NODE_UUID, "network": NODE_UUID}]},
        {"networks": [{"port": NODE_UUID}] * 17},
    ],
)
def test_what_is_malformed_or_too_large_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        parsed(**fields)


def test_what_may_be_secret_is_not_in_a_representation() -> None:
    request = parsed(config_drive={"user_data": "password: hunter2", "public_keys": ["ssh-ed25519 AAAA"]})
    assert "hunter2" not in repr(request) and "AAAA" not in repr(request)


def test_the_cell_gets_what_the_request_and_its_flavor_state_of_the_machine() -> None:
    request = parsed(
        image_source={"source": "http://a"}, config_drive={"user_data": "u"}, networks=[{"port": NODE_UUID}], name="n"
    )
    specs = {
        "trait:CUSTOM_RAID": "required",
        "trait:CUSTOM_OLD": "forbidden",
        "trait1:CUSTOM_NIC": "required",
        "capabilities:boot_mode": "uefi",
        "resources:CUSTOM_GOLD": "1",
    }
    spec = instance_spec(request, SchedulerConfig(flavors={request.flavor: Flavor(disk_gb=50, extra_specs=specs)}))
    assert spec.image_source == request.image_source and spec.networks == request.networks
    assert spec.config_drive == ConfigDrive(user_data="u")
    assert (spec.root_gb, spec.traits, spec.capabilities) == (50, ("CUSTOM_RAID",), {"boot_mode": "uefi"})


@pytest.mark.parametrize("row", BY_QUEUE.values(), ids=lambda row: row.name)
def test_a_queue_of_one_consumer_is_never_made_anew_in_place_of_another(row: QueueRow) -> None:
    """It has what waits for its turn; what expires by itself has nothing that anybody waits for."""
    planned = plan(row, row.name, ())
    assert planned.disposable is (row.kind is QueueKind.EXPIRING and not row.single_active)
    assert not (planned.disposable and planned.single_active) and not (planned.disposable and planned.exclusive)
