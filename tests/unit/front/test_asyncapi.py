"""The AsyncAPI document of the bus: valid by the published schema, whole, and true to what goes over the wire.

tests/asyncapi/3.0.0.json.gz is the schema of AsyncAPI 3.0.0 as the package @asyncapi/specs 6.11.1 publishes it, under
the Apache License 2.0.
"""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from typer.testing import CliRunner

from berth.cli import app
from berth.reference.asyncapi import document
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent, BuildRequest, BuildState
from bus.contracts.catalogue import MESSAGES, REPLIES
from bus.contracts.feed import SnapshotPage
from bus.contracts.placement import ProviderState

SCHEMA = Path(__file__).parents[2] / "asyncapi" / "3.0.0.json.gz"
UUID = "0c8f0c9e-3f0d-4d9f-8b58-9c2f6f0f2a11"


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(gzip.decompress(SCHEMA.read_bytes()))
    return jsonschema.Draft7Validator(schema)


def references(part: Any) -> Iterator[str]:
    if isinstance(part, dict):
        if isinstance(part.get("$ref"), str):
            yield part["$ref"]
        for one in part.values():
            yield from references(one)
    elif isinstance(part, list):
        for one in part:
            yield from references(one)


def resolved(whole: dict[str, Any], reference: str) -> Any:
    found: Any = whole
    for step in reference.removeprefix("#/").split("/"):
        found = found[step]
    return found


@pytest.mark.parametrize("public", [False, True])
def test_the_document_is_valid_by_the_published_schema(validator: Any, public: bool) -> None:
    wrong = [
        f"{'/'.join(map(str, one.path))}: {one.message[:200]}" for one in validator.iter_errors(document(public=public))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("where", "key", "value"),
    [
        ("", "asyncapi", "2.6.0"),
        ("operations/build.request.v1", "action", "publish"),
        ("operations/build.request.v1", "channels", []),
        ("channels/build.request.v1", "bindings", {"amqp": {"is": "topic", "bindingVersion": "0.3.0"}}),
        ("components/messages/build.request.v1", "payload", 3),
    ],
)
def test_the_published_schema_finds_what_is_wrong(validator: Any, where: str, key: str, value: Any) -> None:
    broken = copy.deepcopy(document())
    (resolved(broken, where) if where else broken)[key] = value
    assert not validator.is_valid(broken)  # ends with the first error


def test_every_message_and_reply_is_in_it_and_every_reference_leads_somewhere() -> None:
    whole = document()
    tags = {row.tag for row in MESSAGES}
    assert whole["operations"].keys() == tags and whole["channels"].keys() == tags | {"replies"}
    assert len(whole["components"]["messages"]) == len({*(row.message for row in MESSAGES), *REPLIES})
    for row in MESSAGES:
        operation, channel = whole["operations"][row.tag], whole["channels"][row.tag]
        assert operation["x-publishers"] == list(row.publishers) and channel["address"] == row.key
        assert ("reply" in operation) == (row.reply is not None)
        assert channel.get("parameters", {}).keys() == {part[1:-1] for part in row.key.split(".") if part[0] == "{"}
    for reference in references(whole):
        assert resolved(whole, reference), reference


def test_the_public_part_has_no_message_between_berths_own_parts() -> None:
    operations = document(public=True)["operations"]
    assert operations.keys() == {row.tag for row in MESSAGES if row.public}


@pytest.mark.parametrize(
    "message",
    [
        BuildRequest(instance_uuid=UUID, flavor="m1.small", project_id="demo"),
        BuildEvent(instance_uuid=UUID, project_id="p", state=BuildState.ACTIVE, sequence=3, terminal=True, at=1.5),
        SnapshotPage(
            sequence=1,
            providers=(
                ProviderState(
                    uuid=UUID,
                    name="h",
                    root_uuid=UUID,
                    generation=1,
                    shape=1,
                    inventories={"VCPU": (8.0, 1, 8, 1, 8, 0, 1.0)},
                ),
            ),
        ),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_goes_over_the_wire_is_as_the_document_describes(message: Message) -> None:
    whole = document()
    schema = {"$ref": f"#/components/schemas/{type(message).__name__}", "components": whole["components"]}
    body = json.loads(msgspec.json.encode(message))
    checker = jsonschema.Draft7Validator(schema)
    assert [one.message for one in checker.iter_errors(body)] == []
    assert list(checker.iter_errors({**body, "type": "another.v1"}))


def test_a_tuple_has_all_of_its_parts() -> None:
    whole = document()
    schema = {"$ref": "#/components/schemas/ProviderState", "components": whole["components"]}
    state = ProviderState(uuid=UUID, name="h", root_uuid=UUID, generation=1, shape=1)
    short = {**json.loads(msgspec.json.encode(state)), "inventories": {"VCPU": ["eight", 1]}}
    assert list(jsonschema.Draft7Validator(schema).iter_errors(short))


def test_the_command_prints_it() -> None:
    for words in (["asyncapi"], ["asyncapi", "--public"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0
        assert json.loads(result.stdout) == document(public="--public" in words)
