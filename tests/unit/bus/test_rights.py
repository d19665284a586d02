"""Who may send what: keys, queues of requests, rights, bounds of deploys."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus import codec as wire
from bus.consuming import in_flight
from bus.consuming.in_flight import BufferedBytes
from bus.contracts.actions import ActionKind, ActionRequest
from bus.contracts.base import Message, Meta
from bus.contracts.build import BuildRequest, DeleteRequest, FlavorCount
from bus.contracts.catalogue import (
    DOOR_KEY,
    MESSAGES,
    OF_PROJECT,
    OPERATORS,
    OPERATORS_KEY,
    destination,
    operators_rights,
    queues_taking,
    routing_key,
)
from bus.contracts.deploy import MAX_NETWORK_DATA, MAX_USER_DATA, ConfigDrive
from bus.contracts.queues import BY_QUEUE, COMMANDS, REQUEST_QUEUES, QueueKind, QueueRow
from bus.published_key import dead_letter_code_of, published_key
from bus.topology import matches, plan
from bus.transport import UNREAD, Delivery, Outgoing
from scheduler_worker.build.decision import instance_spec
from scheduler_worker.config import Flavor, SchedulerConfig
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
        "by",
    },
    "build.delete.v1": {"instance_uuid", "project_id", "by"},
    "instance.action.v1": {
        "request_id", "instance_uuid", "project_id", "user_id", "flavor", "image", "image_properties", "ignore_hosts",
        "max_attempts", "policy", "migration", "auto_confirm_s", "offload", "soft", "rescue_password", "timeout_s",
        "by",
    },
}  # fmt: skip
OPERATORS_OWN: list[tuple[type[Message], dict[str, Any]]] = [
    (BuildRequest, {**BUILD, "host": "h1"}),
    (BuildRequest, {**BUILD, "host": "h1", "forced": True}),
    (BuildRequest, {**BUILD, "image_source": {"source": "http://169.254.169.254/latest/"}}),
    (BuildRequest, {**BUILD, "image_source": {"source": "file:///etc/ironic/ironic.conf"}}),
    (BuildRequest, {**BUILD, "volumes": [{"volume_id": "v", "properties": {"target_portal": "10.0.0.1:3260"}}]}),
    (ActionRequest, {**MOVE, "kind": "rebuild", "image": "i", "image_source": {"source": "http://10.0.0.1:8500/"}}),
    (ActionRequest, {**MOVE, "kind": "revert", "force": True}),
    (ActionRequest, {**MOVE, "kind": "evacuate"}),
    (ActionRequest, {**MOVE, "kind": "evacuate", "fenced": True, "force": True}),
    (ActionRequest, {**MOVE, "kind": "migrate"}),
    (ActionRequest, {**MOVE, "kind": "live-migrate"}),
    (ActionRequest, {**MOVE, "kind": "resize", "flavor": "m1.large", "host": "h1"}),
    (ActionRequest, {**MOVE, "kind": "unshelve", "host": "h1", "forced": True}),
]
PROJECTS_OWN: list[tuple[type[Message], dict[str, Any]]] = [
    (BuildRequest, BUILD),
    (BuildRequest, {**BUILD, "count": 3, "min_count": 1, "ignore_hosts": ["h1"]}),
    (BuildRequest, {**BUILD, "image": "debian-12", "networks": [{"network": UUID}, {"port": UUID}]}),
    (ActionRequest, {**MOVE, "kind": "rebuild", "image": "debian-12"}),
    (ActionRequest, {**MOVE, "kind": "revert"}),
    (ActionRequest, {**MOVE, "kind": "confirm"}),
    (ActionRequest, {**MOVE, "kind": "resize", "flavor": "m1.large"}),
    (ActionRequest, {**MOVE, "kind": "revert", "force": False}),
]


def codec() -> wire.Codec:
    from bus.contracts.catalogue import queues_taking  # noqa: PLC0415

    return wire.Codec([row.message for row in queues_taking("scheduler.requests")], queue="scheduler.requests")


def test_every_field_of_a_projects_message_is_decided_about() -> None:
    for row in MESSAGES:
        if "client" in row.publishers:
            operators = set(OPERATORS.get(row.message, {})) - {"kind"}
            ours = FIELDS_OF_PROJECT[row.tag] | {"kind"} if row.message is ActionRequest else FIELDS_OF_PROJECT[row.tag]
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
    assert OPERATORS[ActionRequest]["kind"] == {ActionKind.MIGRATE, ActionKind.LIVE_MIGRATE, ActionKind.EVACUATE}


# --- The routing key against which a message is read: each way by which one can arrive.


MINE, FOREIGN = "build.delete.mine", "build.delete.another"
QUEUE = "scheduler.requests"


def arrived(exchange: str, key: str, **headers: Any) -> Delivery:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Arrived(Outgoing(exchange=exchange, routing_key=key, body=b"{}", headers=named))  # type: ignore[return-value]


def death(queue: str = QUEUE, reason: str = "expired", exchange: str = "berth", key: str = MINE) -> dict[str, Any]:
    return {"count": 1, "queue": queue, "reason": reason, "exchange": exchange, "routing-keys": [key]}


DELAYED = death("berth.delayed.200", exchange="berth.delay.200", key=QUEUE)
ARRIVALS: dict[str, tuple[Delivery, str | None]] = {
    "a client's": (arrived("berth", MINE), MINE),
    "with a header of its own for the key": (arrived("berth", MINE, berth_key=FOREIGN), MINE),
    "an event's": (arrived("berth.events", "build.event.active.p"), "build.event.active.p"),
    "by the default exchange": (arrived("", QUEUE, berth_key=MINE), None),
    "parked by a worker": (arrived("berth.dead", QUEUE, berth_key=MINE), MINE),
    "parked by a worker, key unknown": (arrived("berth.dead", QUEUE), ""),
    "given up by the broker": (arrived("berth.dead", QUEUE, x_death=[death()]), MINE),
    "the same after a delay": (arrived("berth.dead", QUEUE, x_death=[death(), DELAYED]), ""),
    "the same with no record": (arrived("berth.dead", QUEUE, x_death=[True]), None),
    "the same with half a record": (arrived("berth.dead", QUEUE, x_death=[{"exchange": "berth"}]), None),
    "the same, with a record that more headers hide": (arrived("berth.dead", QUEUE, **{UNREAD: True}), None),
    "the same, with a key of its publisher's": (
        arrived("berth.dead", QUEUE, berth_key=FOREIGN, **{UNREAD: True}),
        None,
    ),
    "passed on by another's queue to the letters": (
        arrived("berth.dead", QUEUE, x_death=[death(), death("compute.x", exchange="compute.x")], berth_key=FOREIGN),
        None,
    ),
    "passed on by another's queue to a delay": (
        arrived("berth.return", QUEUE, x_death=[DELAYED, death("compute.x", exchange="compute.x")]),
        None,
    ),
    "back from no delay": (arrived("berth.return", QUEUE), None),
    "back from a delay": (arrived("berth.return", QUEUE, x_death=[DELAYED], berth_key=FOREIGN), ""),
    "a letter that goes back": (arrived("berth.replays", QUEUE, berth_key=MINE), MINE),
    "the same, given up by the broker": (
        arrived("berth.dead", QUEUE, x_death=[death(exchange="a.berth.replays", key=f"a.{QUEUE}")], berth_key=MINE),
        MINE,
    ),
    "a reply": (arrived("berth.replies", "berth.reply.p"), ""),
}


@pytest.mark.parametrize("name", ARRIVALS)
def test_the_key_of_each_arrival(name: str) -> None:
    delivery, key = ARRIVALS[name]
    assert published_key(delivery) == key


@pytest.mark.parametrize("header", ["x-death", UNREAD])
@pytest.mark.parametrize("queue", ["gateway.requests", "gateway.queries", "scheduler.requests", "conductor.requests"])
def test_what_another_queue_has_dead_lettered_is_not_read(queue: str, header: str) -> None:
    """An event that came back as a malformed request was answered by one, and so on without end."""
    codec = wire.Codec([BuildRequest, DeleteRequest], queue=queue)
    assert codec.read(arrived("berth", MINE, **{header: [death()]}), "new") == []
    for exchange in ("compute.evil", ""):  # which is bound to ours, or leads to every queue
        assert codec.read(arrived(exchange, MINE), "new") == []
    assert len(codec.read(arrived("berth", MINE), "new")) == 1


def test_the_code_of_a_letter() -> None:
    assert dead_letter_code_of(arrived("berth.dead", QUEUE, x_death=[death()])) == "broker.expired"
    assert dead_letter_code_of(arrived("berth.dead", QUEUE, berth_code="message.malformed")) == "message.malformed"


# --- The queues of requests, and what a consumer has of one.


@given(st.from_regex(r"[A-Za-z0-9_\-]{1,64}", fullmatch=True))
def test_each_key_of_a_project_leads_to_one_queue_of_requests(project: str) -> None:
    of_project = [row.key for row in MESSAGES if row.exchange == COMMANDS and row.key.endswith(OF_PROJECT)]
    keys = dict.fromkeys(of_project, "scheduler.requests")
    for template, wanted in {**keys, OPERATORS_KEY: "scheduler.operators", DOOR_KEY: "scheduler.door"}.items():
        words = template.format(project_id=project).split(".")
        takers = [
            name
            for name in REQUEST_QUEUES
            if any(matches(pattern.split("."), words) for _, pattern in BY_QUEUE[name].bindings)
        ]
        assert takers == [wanted]


def test_the_queues_of_requests_refuse_what_is_too_much_and_none_gets_its_retries_where_it_refuses() -> None:
    for row in map(BY_QUEUE.__getitem__, REQUEST_QUEUES):
        planned = plan(row, row.name, row.bindings)
        assert planned.max_bytes > 0 and not planned.drop_head
        assert (row.retries_to or row.name) == "scheduler.operators"
        assert set(queues_taking(row.name)) == set(queues_taking("scheduler.operators"))


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


class Regulated:
    """A subscription that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


def test_a_consumer_with_many_bytes_in_hand_is_paused_until_half_of_them_are_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """512 of a megabyte were in a scheduler's memory."""
    monkeypatch.setattr(in_flight, "MAX_BUFFERED_BYTES", 100)
    held, subscription = BufferedBytes(pauses=True), Regulated()
    held.subscription = subscription  # type: ignore[assignment]
    sent = [Arrived(Outgoing(exchange="", routing_key="", body=b"x" * 40)) for _ in range(4)]
    for one in sent:
        held.add(one)  # type: ignore[arg-type]
    assert (subscription.calls, held.buffered) == (["pause"], 160)
    held.remove(sent[0])  # type: ignore[arg-type]
    held.remove(sent[1])  # type: ignore[arg-type]
    assert subscription.calls == ["pause"]
    held.remove(sent[2])  # type: ignore[arg-type]
    assert (subscription.calls, held.buffered) == (["pause", "resume"], 40)


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
