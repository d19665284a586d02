"""The catalogues that pages are derived from: every code, and every message of the bus."""

from __future__ import annotations

import ast
import copy
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from typer.testing import CliRunner

from berth.asyncapi import document
from berth.cli.main import app
from berth.codes import Code, code_table
from bus.contracts.base import Message
from bus.contracts.build import BuildEvent, BuildRequest, BuildState
from bus.contracts.catalogue import MESSAGES, REPLIES
from bus.contracts.feed import SnapshotPage
from bus.contracts.placement import ClaimOutcome, ProviderState
from lab.reference.codes import PACKAGES
from tests.kit import sources
from tests.kit.sources import FILES, FORMED, NO_CODES, codes_of, literals, logged_in, of_package

# --- Every code that a reply, event, command or log line can carry has a cause and a remedy, and each row is used.


MAX_WORDS = 45  # of a cause and a remedy together
REFERENCE = sources.ROOT / "docs" / "reference"
# In a remedy: a command of berth, a setting, a page.
COMMAND = re.compile(r"`berth ([a-z][a-z -]*)")
SETTING = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]*)?`")
PAGE = re.compile(r'docs/[\w/-]+\.md(?:, "([^"]+)")?')


def rows() -> dict[str, Code]:
    return {name: one for package in PACKAGES for name, one in code_table(package).items()}


def test_every_code_has_a_row() -> None:
    known = rows()
    missing = {code: place for package in PACKAGES for code, place in of_package(package).items() if code not in known}
    assert missing == {}, "a row in codes.toml of its package; or, if it is no code, NO_CODES of tests/kit/sources.py"


def test_every_log_line_from_warning_up_has_a_row_of_its_kind() -> None:
    known = rows()
    wrong = {
        name: sources.where(path, line)
        for path in sources.sources(*PACKAGES)
        for name, line in logged_in(path)
        if name not in known or "log" not in known[name].kind
    }
    assert wrong == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_row_is_used_by_its_package(package: str) -> None:
    used = of_package(package).keys() | literals(package)
    assert sorted(code_table(package).keys() - used) == []


def test_outcomes_of_claims_have_rows() -> None:
    """An attempt that was not claimed has the outcome as its code."""
    assert sorted(set(ClaimOutcome) - {ClaimOutcome.CLAIMED} - rows().keys()) == []


def test_a_code_has_one_row() -> None:
    assert len(rows()) == sum(len(code_table(package)) for package in PACKAGES)


def test_what_is_no_code_is_there() -> None:
    """An entry of NO_CODES or FORMED that the sources do not have any more would hide a code of that name."""
    texts = {text for package in PACKAGES for text in literals(package)}
    plain = {text for text in NO_CODES if "*" not in text}
    assert sorted(plain - texts) == []
    known = rows()
    assert sorted(code for formed in FORMED.values() for code in formed if code not in known) == []


def test_rows_are_sorted_and_short() -> None:
    wrong = [
        name
        for package in PACKAGES
        for name, one in code_table(package).items()
        if not one.kind
        or not (one.cause.endswith(".") and one.remedy.endswith("."))
        or "|" in one.cause + one.remedy
        or len((one.cause + " " + one.remedy).split()) > MAX_WORDS
    ]
    assert wrong == []
    assert [package for package in PACKAGES if list(code_table(package)) != sorted(code_table(package))] == []


def test_a_remedy_is_there() -> None:
    """The commands, settings and pages that rows name."""
    headings = re.findall(r"^## `berth ([^`]+)`", (REFERENCE / "commands.md").read_text(), re.MULTILINE)
    nouns = {name.partition(" ")[0] for name in headings}
    settings = _settings()
    sections = {one.partition(".")[0] for one in settings}
    known = settings | rows().keys()
    wrong: list[str] = []
    for name, one in rows().items():
        for text in (one.cause, one.remedy):
            for found in COMMAND.findall(text):
                words = found.split(" -")[0].split()
                is_noun = len(words) == 1 and words[0] in nouns
                if " ".join(words[:2]) not in headings and words[0] not in headings and not is_noun:
                    wrong.append(f"{name}: no command {found}")
            wrong += [
                f"{name}: no setting {setting}"
                for setting in SETTING.findall(text)
                if setting.partition(".")[0] in sections and setting not in known and not FILES.search(setting)
            ]
            for found in PAGE.finditer(text):
                page = sources.ROOT / found.group().partition(",")[0]
                if not page.is_file() or (found[1] and f"## {found[1]}\n" not in page.read_text()):
                    wrong.append(f"{name}: no page {found.group()}")
    assert wrong == []


def _settings() -> set[str]:
    """The settings and sections of docs/reference/settings.md, with their sections' names."""
    found: set[str] = set()
    section = ""
    for line in (REFERENCE / "settings.md").read_text().splitlines():
        if heading := re.match(r"## `\[([\w.]+)", line):
            name = heading[1].removesuffix(".NAME").rstrip(".")
            section = name + "."
            found.add(name)
        elif setting := re.match(r"\| `(\w+)` \|", line):
            found.add(section + setting[1])
    return found


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ('raise Stop(1, "planted.code", "text")', "planted.code"),
        ('Refusal(code="planted.code", reason="")', "planted.code"),
        ('PLANTED = "planted.code"', "planted.code"),
        ('class Planted(Fault):\n    code = "planted"', "planted"),
        ('log.warning("planted.code", of=1)', "planted.code"),
        ('log.error(f"planted.{state}")', "planted.*"),
        ('rejected = {host: f"{kind}.planted"}', "*.planted"),
        ('code = "planted.code" if one else other', "planted.code"),
        ('from bus.published_key import BROKERS\nEXPIRED = f"{BROKERS}planted"', "broker.planted"),
    ],
)
def test_a_planted_code_is_found(source: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(source)
    assert [found for found, _ in codes_of(path)] == [code]
    assert code not in rows()


@pytest.mark.parametrize(
    "source",
    [
        'log = structlog.get_logger("planted.logger")',
        'log.info("planted.line")',
        'path = folder / "planted.part"',
        'class Planted(Message, tag="planted.message.v1"):\n    pass',
    ],
)
def test_what_its_place_shows_to_be_no_code_is_none(source: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(source)
    assert ast.parse(source)
    assert list(codes_of(path)) == []


# --- The AsyncAPI document of the bus: valid by the published schema, whole, and true to what goes over the wire.


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
                    spec_generation=1,
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
    state = ProviderState(uuid=UUID, name="h", root_uuid=UUID, generation=1, spec_generation=1)
    short = {**json.loads(msgspec.json.encode(state)), "inventories": {"VCPU": ["eight", 1]}}
    assert list(jsonschema.Draft7Validator(schema).iter_errors(short))


def test_a_field_is_described_by_the_meaning_beside_it() -> None:
    schemas = document()["components"]["schemas"]
    page, request = schemas["BuildPage"]["properties"], schemas["BuildRequest"]["properties"]
    assert request["host"]["description"] and request["max_attempts"]["description"]  # at its line, and above it
    assert request["image_source"]["description"]  # of a base
    assert page["searched_to"]["description"] == page["searched_to_instance"]["description"]  # of two fields
    assert all(one.get("description") for one in schemas["StageTimes"]["items"])


def test_the_command_prints_it() -> None:
    for words in (["bus", "asyncapi"], ["bus", "asyncapi", "--public"]):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0
        assert json.loads(result.stdout) == document(public="--public" in words)
