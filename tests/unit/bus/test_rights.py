"""An operator's rights: one table, which every door goes by."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from bus import wire
from bus.contracts.base import Message, Meta
from bus.contracts.build import BuildRequest
from bus.contracts.catalogue import BY_QUEUE, BY_TYPE, MESSAGES, OPERATORS, destination, operators_rights, routing_key
from bus.contracts.moves import MoveKind, MoveRequest
from tests.unit.bus.test_wire import UUID, Arrived

BUILD = {"instance_uuid": UUID, "flavor": "m1.small", "project_id": "p"}
MOVE = {"request_id": UUID, "instance_uuid": UUID, "project_id": "p"}

# Every field of each message that a project publishes, by whose right it is. A field that is new has to be put here.
OF_PROJECT = {
    "build.request.v1": {
        "instance_uuid", "flavor", "project_id", "user_id", "name", "image", "availability_zone", "ignore_hosts",
        "max_attempts", "build_timeout_s", "server_group", "group", "different_host", "same_host", "image_properties",
        "image_source", "config_drive", "networks", "volumes", "on_host_failure", "count", "also", "min_count",
    },
    "build.delete.v1": {"instance_uuid", "project_id"},
    "instance.move.v1": {
        "request_id", "instance_uuid", "project_id", "user_id", "flavor", "image", "image_properties", "image_source",
        "ignore_hosts",
        "max_attempts", "policy", "migration", "auto_confirm_s", "offload", "rescue_password", "timeout_s",
    },
}  # fmt: skip

OPERATORS_OWN: list[tuple[type[Message], dict[str, Any]]] = [
    (BuildRequest, {**BUILD, "host": "h1"}),
    (BuildRequest, {**BUILD, "host": "h1", "forced": True}),
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
            ours = OF_PROJECT[row.tag] | {"kind"} if row.message is MoveRequest else OF_PROJECT[row.tag]
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
def test_an_operators_message_goes_to_the_queue_itself_and_is_taken(
    kind: type[Message], fields: dict[str, Any]
) -> None:
    message = msgspec.convert(fields, kind)
    assert destination(message) == ("", "scheduler.requests")
    sent = wire.single(wire.pack(message, Meta(id="m")), *destination(message))
    assert codec().read(Arrived(sent), "new") == [wire.Read(message, Meta(id="m"))]


@pytest.mark.parametrize(("kind", "fields"), OPERATORS_OWN)
def test_one_that_is_replayed_from_the_dead_letters_is_read_under_its_first_key(
    kind: type[Message], fields: dict[str, Any]
) -> None:
    """An operator who replays a project's refused message does not thereby request it."""
    message = msgspec.convert(fields, kind)
    packed = wire.pack(message, Meta(id="m"))
    letter = wire.single(packed, "", "scheduler.requests")
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
