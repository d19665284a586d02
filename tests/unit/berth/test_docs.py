"""The pages: derived ones hold what the code holds, and blocks, commands and output in them are true."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shlex
import subprocess
import textwrap
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec
import pytest
import typer
import yaml
from jsonschema import Draft202012Validator
from msgspec.structs import replace
from starlette.routing import Match, Route

from berth.audit.findings import findings
from berth.cli.claims.checks import show_finding
from berth.cli.fleet import hosts
from berth.cli.fleet.drains import show_begun, show_drain, show_progress
from berth.cli.fleet.hosts import show_decision, show_deleted, show_deleted_service
from berth.cli.main import COMMANDS, app
from berth.cli.objects.objects import SECTIONS, read_file
from berth.cli.output import ListedItems, ListOutput, print_list
from berth.config.settings import check_urls, read_settings
from berth.web.api import API_ROOT, WebApi
from berth.web.openapi import _operations, document
from berth.web.operations import WebActions, WebDrains, WebOperations
from berth.web.problems import _TITLES as STATUSES
from berth.web.sign_in_sessions import read_tokens
from bus.codec import MAX_BATCH_ITEMS, MAX_BODY_BYTES, MAX_CLIENT_BYTES, MAX_CLIENT_VALUES
from bus.contracts.actions import ActionKind
from bus.contracts.build import BuildRequest, HostRecord
from bus.contracts.catalogue import MESSAGES, MessageRow
from bus.contracts.drains import DrainMoveState, DrainProgress, DrainState, DrainTarget
from bus.contracts.objects import ObjectsChange
from bus.contracts.operations import AdminState, HostAdminState, HostDeleted, ServiceDeleted
from bus.contracts.placement import Claim, ClaimOption, ClaimOutcome, GroupPolicy, ServerGroup
from bus.persistence.address import parse_database_url
from bus.rabbitmq.address import parse_bus_url
from lab.reference.messages import _type
from lab.reference.pages import PAGES
from nova_scheduler.app import PCI_WEIGHER
from nova_scheduler.config import DEVICE_FILTERS
from placement_worker.domain.server_groups import permitted
from scheduler_worker.config import (
    DEFAULT_FILTERS,
    DEFAULT_WEIGHERS,
    HOST_FACT_FILTERS,
    MORE_FILTERS,
    NOVA_WEIGHERS,
)
from scheduler_worker.objects.change_plan import plan
from scheduler_worker.records.object_records import ChangePlan
from tests.kit.certificates import Authority
from tests.kit.documents import PAGES as ALL_PAGES
from tests.kit.documents import ROOT, blocks, blocks_of_all_pages, typed
from tests.kit.sources import OURS
from tests.unit.berth.test_audit import HELD, look

# --- the derived pages hold what the code holds


DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("page", PAGES)
def test_a_derived_page_is_up_to_date(page: str) -> None:
    assert (DOCS / "reference" / page).read_text() == PAGES[page](), "run scripts/nightly docs"


def test_every_message_and_queue_and_state_is_on_the_page() -> None:
    page = PAGES["messages.md"]()
    from bus.contracts.build import BuildState  # noqa: PLC0415
    from bus.contracts.catalogue import MESSAGES  # noqa: PLC0415
    from bus.contracts.queues import QUEUES  # noqa: PLC0415

    assert all(f"### `{row.tag}`" in page for row in MESSAGES)
    assert all(f"| `{row.name}` |" in page for row in QUEUES)
    assert "`BuildState`: one of " + ", ".join(f"`{state}`" for state in sorted(BuildState)) in page


LISTED = (*DEFAULT_FILTERS, *MORE_FILTERS, *HOST_FACT_FILTERS, *DEFAULT_WEIGHERS, *NOVA_WEIGHERS)


def test_features_has_the_filters_and_weighers_that_there_are_and_no_other() -> None:
    """Names in code type are there; ProjectHostFilter is berth's own."""
    page = (DOCS / "reference" / "features.md").read_text()
    named = set(re.findall(r"`(\w*(?:Filter|Weigher|Isolation))`", page))
    there = {path.rpartition(".")[2] for path in (*LISTED, PCI_WEIGHER)} | set(DEVICE_FILTERS)
    assert named == there - {"ProjectHostFilter"}


def test_a_decision_record_has_its_number_a_date_and_a_status() -> None:
    records = sorted((DOCS / "decisions").glob("[0-9]*.md"))
    assert len({record.name[:4] for record in records}) == len(records)
    for record in records:
        title, empty, status = record.read_text().split("\n")[:3]
        assert title.startswith(f"# {record.name[:4]}. "), record.name
        assert not empty
        assert status.startswith("Date: 20"), record.name
        assert any(f"Status: {word}" in status for word in ("proposed", "accepted", "superseded by")), record.name


# --- the rules of the code that clients have to know about messages: the page documents it, and the code keeps it


PAGE = ROOT / "docs" / "reference" / "messages.md"
HOSTS = ("10000000-0000-4000-8000-000000000001", "10000000-0000-4000-8000-000000000002")
GROUP = "30000000-0000-4000-8000-000000000001"
SENT_BY_CLIENTS = [row for row in MESSAGES if {"client", "operator"} & set(row.publishers)]


def lists(schema: Any, path: str) -> Iterator[tuple[str, int | None]]:
    """(where, bound) of each list and each mapping of any names in a JSON schema."""
    if isinstance(schema, list):
        for one in schema:
            yield from lists(one, path)
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "array" and "prefixItems" not in schema:
        yield path, schema.get("maxItems")
    for name, inner in schema.items():
        yield from lists(inner, f"{path}.{name}" if name not in ("properties", "$defs", "anyOf", "items") else path)


@pytest.mark.parametrize("row", SENT_BY_CLIENTS, ids=lambda row: row.message.__name__)
def test_each_list_that_a_client_sends_is_bounded_and_its_bound_is_documented(row: MessageRow) -> None:
    (_,), components = msgspec.json.schema_components([row.message])
    bounds = dict(lists(components, row.message.__name__))
    assert not [where for where, bound in bounds.items() if bound is None]
    text = PAGE.read_text()
    for where, bound in bounds.items():
        assert f"at most {bound})" in text, where


def test_the_lengths_of_a_body_and_of_a_batch_are_documented() -> None:
    text = " ".join(PAGE.read_text().split())
    assert f"at most {MAX_CLIENT_BYTES:,} bytes (`message.too_large`) and {MAX_CLIENT_VALUES:,} values" in text
    assert f"at most {MAX_BODY_BYTES:,} bytes on others" in text
    assert f"at most {MAX_BATCH_ITEMS:,} items" in text


def test_states_that_may_be_left_out_are_documented() -> None:
    """Held by `tests/unit/bus/test_lingering.py`."""
    text = " ".join(PAGE.read_text().split())
    assert "a state that the next one overtook is not published, so any but the terminal may be missing" in text


def test_each_member_is_held_to_the_policy_that_its_own_request_names() -> None:
    """Of two requests that name one group with contradicting policies none is refused for it."""
    apart = Claim(
        consumer=HOSTS[0],
        attempt=1,
        options=(ClaimOption(allocations={HOSTS[0]: {"VCPU": 1}}),),
        project_id="p",
        server_group=ServerGroup(uuid=GROUP, policy=GroupPolicy.ANTI_AFFINITY),
    )
    together = replace(apart, server_group=ServerGroup(uuid=GROUP, policy=GroupPolicy.AFFINITY))
    here, there = (ClaimOption(allocations={host: {"VCPU": 1}}, host=host) for host in HOSTS)
    others = {HOSTS[0]: 1}
    assert permitted(apart, here, others) is ClaimOutcome.POLICY_VIOLATED
    assert permitted(together, here, others) is ClaimOutcome.CLAIMED
    assert permitted(apart, there, others) is ClaimOutcome.CLAIMED
    assert permitted(together, there, others) is ClaimOutcome.POLICY_VIOLATED
    own = "each member is held to the policy that its own request names"
    documented = f"{own}, even if another member's request names another policy"
    assert documented in " ".join(PAGE.read_text().split())


# --- the output that a console block of the documents shows is the output of berth


UUID = "10000000-0000-4000-8000-000000000001"
HOST = "cell1-c1-00003"
BY = "ann@admin1"
AUDIT, DRAINS, HOSTS_PAGE = "docs/operate/audit.md", "docs/operate/drains.md", "docs/operate/hosts.md"
# The address that `berth serve web` prints: `tests/browser/pages.py` reads it.
READ_ELSEWHERE = {"docs/use/web.md"}
OMITTED = "..."
AT = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ")


def output_of(page: str) -> list[str]:
    """The lines of a page's console blocks that are no commands."""
    lines, is_console, goes_on = [], False, False
    for line in (ROOT / page).read_text().splitlines():
        if line.startswith("```"):
            is_console = line == "```console"
        elif is_console and line.strip():
            is_command = goes_on or line.startswith("$ ")
            goes_on = is_command and line.endswith("\\")
            if not is_command and line != OMITTED:
                lines.append(line.rstrip())
    return lines


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_every_page_that_shows_output_is_read() -> None:
    pages = {str(path.relative_to(ROOT)) for path in ALL_PAGES}
    assert {page for page in pages if output_of(page)} == {AUDIT, DRAINS, HOSTS_PAGE} | READ_ELSEWHERE


def test_the_output_about_hosts_is_what_berth_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def decided(state: AdminState, **more: object) -> HostAdminState:
        return HostAdminState(host_uuid=UUID, host=HOST, state=state, by=BY, **more)  # type: ignore[arg-type]

    show_decision(decided(AdminState.DISABLED))
    show_decision(decided(AdminState.FENCED, pending=AdminState.ENABLED, stale_machines=12, fence=3, acknowledged=2))
    show_deleted(HostDeleted(host_uuid=UUID, host=HOST, removed=True))
    contested = HostRecord(
        uuid=UUID,
        name=HOST,
        cell="cell1",
        service="c1",
        up=True,
        resources={"VCPU": (2, 16)},
        claimed_also_by="c2",
    )
    show_deleted_service(ServiceDeleted(service="c1", cell="cell1", removed=True))
    show_hosts([contested])
    assert printed(capsys) == output_of(HOSTS_PAGE)


def show_hosts(found: list[HostRecord]) -> None:
    async def read() -> ListedItems[HostRecord]:
        return ListedItems(found)

    asyncio.run(print_list(read, hosts.HOSTS, ListOutput()))


def test_a_fence_and_a_host_that_no_service_announces_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    show_decision(HostAdminState(host_uuid=UUID, host=HOST, state=AdminState.FENCED, by=BY, fence=2, acknowledged=1))
    show_hosts([HostRecord(uuid=UUID, name=HOST, reported=False, enabled=False, resources={"VCPU": (2, 16)})])
    lines = printed(capsys)
    assert lines[:2] == [
        f"{HOST}: fenced, not acknowledged by its cell yet, by {BY}",
        "  leave it off until `berth fence list` shows that its cell has acknowledged it",
    ]
    assert lines[-1].split() == [HOST, "not", "reported", "2/16"]


def test_the_output_of_a_drain_is_what_berth_prints(capsys: pytest.CaptureFixture[str]) -> None:
    instances = 212

    def seen(state: DrainState, counts: dict[DrainMoveState, int]) -> DrainProgress:
        return DrainProgress(
            id="4f0c...",
            host="rack7",
            target=DrainTarget.AGGREGATE,
            kind=ActionKind.LIVE_MIGRATE,
            by=BY,
            reason="power",
            state=state,
            code="drain.done" if state is DrainState.ENDED else "",
            started_at=0.0,
            deadline_at=None,
            at_once=8,
            per_minute=None,
            hosts=40,
            planned=instances,
            counts={one.value: count for one, count in sorted(counts.items())},
        )

    show_begun(seen(DrainState.RUNNING, {DrainMoveState.WAITING: instances}))
    show_progress(seen(DrainState.RUNNING, {DrainMoveState.WAITING: instances - 8, DrainMoveState.UNDER_WAY: 8}))
    show_drain(seen(DrainState.ENDED, {DrainMoveState.MOVED: instances}))
    assert printed(capsys) == output_of(DRAINS)


def test_the_output_of_an_audit_is_what_berth_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (orphaned,) = findings(look(allocations={**HELD, "633a50ee-...": {"8910c5a1-...": {"VCPU": 1}}},
                                held_by_bus={"633a50ee-..."}))  # fmt: skip
    show_finding("found", orphaned)
    show_finding("gone", orphaned)
    documented, lines = output_of(AUDIT), printed(capsys)
    assert all(AT.match(line) for line in (*documented, *lines))
    assert [AT.sub("", line) for line in lines] == [AT.sub("", line) for line in documented]


def test_no_page_installs_berth_by_its_name() -> None:
    """On PyPI the name is another project's, which pip would install."""
    by_name = re.compile(r"pip install[^\n]* '?berth(\[|['\s`]|$)", re.MULTILINE)
    sources = [path for package in ("berth", "bus") for path in (ROOT / package).rglob("*.py")]
    assert [path for path in (*ALL_PAGES, *sources) if by_name.search(path.read_text())] == []
    wheels = {name for path in ALL_PAGES for name in re.findall(r"(\w+)-[\d.]+-py3-none-any\.whl", path.read_text())}
    assert wheels == {"berth_scheduler"}


# --- the commands in README and the pages are ones that berth takes: command lines,


README = (ROOT / "README.md").read_text()
KINDS = ("start", "operate", "use", "concepts", "contributing")
TEXTS = [path.read_text() for kind in KINDS for path in sorted((ROOT / "docs" / kind).glob("*.md"))]


def indented(*pages: str) -> list[str]:
    """The code blocks that are marked by their indentation."""
    return [line[4:] for page in pages for line in page.splitlines() if line.startswith("    ")]


class Task(NamedTuple):
    """A row of the table of tasks: berth's command first, then those of other tools ("": none)."""

    commands: list[str]
    words: str
    reason: str


def tasks() -> list[Task]:
    lines = (DOCS / "use" / "tasks.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]
    return [Task(["" if one == "-" else one.strip("`") for one in row[1:6]], *row[6:]) for row in cells]


def test_the_table_of_tasks_counts_words_and_names_what_is_longer() -> None:
    assert len(tasks()) == 30
    for row in tasks():
        words = [len(one.split()) for one in row.commands]
        assert row.words == " / ".join(str(one) if one else "-" for one in words), row.commands
        assert bool(row.reason) == any(0 < one < words[0] for one in words[1:]), row.commands


def command_lines() -> list[str]:
    """The lines of the pages that run `berth`, without prompt, comment and redirection."""
    typed = [block for kind in ("sh", "") for block in blocks(kind, README, *TEXTS)] + indented(*TEXTS)
    lines = [line for text in typed for line in text.replace("\\\n", " ").splitlines()]
    shown = [line for block in blocks("console", README, *TEXTS) for line in block.replace("\\\n", " ").splitlines()]
    lines += [line[2:] for line in shown if line.startswith("$ ")]
    lines += [row.commands[0] for row in tasks()]
    parts = [re.split(r"\s#|\s>|\s\|\s|\s&&\s", line)[0] for line in lines if "`" not in line]
    parts = [one for part in parts for one in re.split(r"; (?=berth )", part)]
    commands = [part.strip().removeprefix("PYTHONPATH=. ") for part in parts]
    return list(dict.fromkeys(line for line in commands if line.removeprefix(".venv/bin/").startswith("berth ")))


@pytest.mark.parametrize("line", command_lines())
def test_a_command_of_the_readme_is_understood(line: str) -> None:
    words = shlex.split(line.replace("UUID", str(uuid.UUID(int=1))))[1:]
    command = typer.main.get_command(app)
    context = command.make_context("berth", list(words))
    while hasattr(command, "resolve_command"):
        left = [*context._protected_args, *context.args]
        name, command, words = command.resolve_command(context, left)
        assert command is not None and name is not None
        context = command.make_context(name, list(words), parent=context)


def test_every_command_that_a_text_names_is_there() -> None:
    """Also those within a sentence: in a page, a docstring, a remedy, an alert."""
    kinds = {".md", ".py", ".toml", ".yml", ".html", ".service"}
    paths = [path for folder in (*OURS, "docs", "deploy", "lab") for path in (ROOT / folder).rglob("*")]
    former = DOCS / "operate" / "upgrade.md"
    wrong = []
    for path in [ROOT / "README.md", *(one for one in paths if one.suffix in kinds and one != former)]:
        for first, second in re.findall(r"`berth ([a-z][a-z-]*)(?:[ \n]+([a-z][a-z-]*))?", path.read_text()):
            entry = COMMANDS.get(first)
            if entry is None or (second and not isinstance(entry, str) and second not in entry.verbs):
                wrong.append(f"{path.relative_to(ROOT)}: berth {first} {second}")
    assert wrong == []


def test_the_settings_of_the_how_to_are_settings(tmp_path: Path) -> None:
    (text,) = blocks("toml", (ROOT / "docs" / "operate" / "deploy.md").read_text())
    path = tmp_path / "berth.toml"
    path.write_text(text)
    found = read_settings(path, {})
    assert (found.bus.url[:7], tuple(found.cells), found.database.url[:13]) == ("amqp://", ("cell1",), "postgresql://")


@pytest.mark.parametrize(("page", "scheme", "hosts"), [("tls", "amqps", 1), ("high-availability", "amqp", 3)])
def test_the_urls_of_a_how_to_are_urls(page: str, scheme: str, hosts: int, tmp_path: Path) -> None:
    (text,) = blocks("toml", (ROOT / "docs" / "operate" / f"{page}.md").read_text())
    authority = Authority(tmp_path, "ca")
    authority.issue("worker")
    path = tmp_path / "berth.toml"
    path.write_text(text.replace("/etc/berth/", f"{tmp_path}/"))
    found = read_settings(path, {})
    check_urls(found)
    for url in (found.bus.url, found.cells["cell1"].url):
        address = parse_bus_url(url)
        assert (address.scheme, len(address.hosts)) == (scheme, hosts)
    database = parse_database_url(found.database.url)
    assert (len(database.hosts) > 1) is (hosts > 1)
    assert database.target == "read-write"


def test_the_request_of_the_readme_is_a_request() -> None:
    (text,) = blocks("json", README)
    assert msgspec.json.decode(text, type=BuildRequest).flavor == "m1.small"


def test_what_the_readme_points_at_exists() -> None:
    for text in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (ROOT / target).exists(), target
        for script in re.findall(r"`(scripts/[\w-]+)", text):
            assert (ROOT / script).exists(), script


# --- every fenced block of the documents is of a language that some test takes, and its text is right in that language


# Of each language, what takes its blocks. "": prose in columns and output; mermaid and toctree: the site's build.
TAKEN_BY = {
    "": "this file, its lines of berth",
    "console": "this file, its lines of berth, too",
    "ini": "tests/integration/bus/test_tls.py, by a broker",
    "json": "this file",
    "mermaid": "this file, by the site's build",
    "mysql": "tests/integration/nova_scheduler: test_trial_howto.py, by PostgreSQL; test_cell_database.py, by MariaDB",
    "python": "this file; the tests of the tutorials",
    "sh": "this file, its lines of berth, too",
    "sql": "tests/integration/berth/test_schemas.py, by PostgreSQL",
    "toml": "this file",
    "yaml": "this file",
    "{toctree}": "this file, by the site's build",
}
# The programs that a reader runs beside berth's own commands.
PROGRAMS = {
    ".venv/bin/berth",
    ".venv/bin/python",
    "berth",
    "cp",
    "createdb",
    "curl",
    "dpkg",
    "journalctl",
    "ln",
    "nova-manage",
    "psql",
    "openstack",
    "pg_dump",
    "pg_restore",
    "podman",
    "podman-compose",
    "ps",
    "python3",
    "rabbitmqctl",
    "systemctl",
}
SCRIPTS = [*blocks_of_all_pages("sh"), *((where, typed(text)) for where, text in blocks_of_all_pages("console"))]


def each(blocks: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(text, id=where) for where, text in blocks]


def test_every_block_is_of_a_language_that_a_test_takes() -> None:
    opened = {
        (language, str(path.relative_to(ROOT)))
        for path in ALL_PAGES
        for language in re.findall(r"^ *```([^\s`]*)\n.*?^ *```$", path.read_text(), re.MULTILINE | re.DOTALL)
    }
    assert [one for one in sorted(opened) if one[0] not in TAKEN_BY] == []
    assert {language for language, _ in opened} == TAKEN_BY.keys()


@pytest.mark.parametrize("text", each(SCRIPTS))
def test_a_shell_takes_what_is_to_be_typed(text: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr
    for script in re.findall(r"(?:^|\s)((?:scripts|benchmarks|deploy)/[\w./-]+)(?=\s|$)", text):
        assert (ROOT / script).exists(), script


@pytest.mark.parametrize("text", each(list(blocks_of_all_pages("sh"))))
def test_a_line_starts_a_program_that_the_guides_know(text: str) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
        known = words and (words[0] in PROGRAMS or (words[0].startswith("scripts/") and (ROOT / words[0]).exists()))
        assert not words or known, line


@pytest.mark.parametrize("text", each(blocks_of_all_pages("python")))
def test_python_compiles(text: str) -> None:
    compile(text, "a block of the documents", "exec")


@pytest.mark.parametrize("text", each(blocks_of_all_pages("yaml")))
def test_yaml_is_a_table(text: str) -> None:
    assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize("text", each(blocks_of_all_pages("toml")))
def test_toml_is_settings_or_a_file_that_a_command_reads(text: str, tmp_path: Path) -> None:
    path = tmp_path / "berth.toml"
    path.write_text(text.replace("/etc/berth/", f"{tmp_path}/"))
    tree = tomllib.loads(text)
    if tree.keys() <= {"tokens"}:
        digests = itertools.count(1)
        path.write_text(re.sub(r'"\.\.\."', lambda _: f'"{next(digests):064x}"', text))
        assert len(read_tokens(path)) == len(tree["tokens"])
    elif tree.keys() <= SECTIONS.keys():
        planned = plan(ObjectsChange(changes=tuple(read_file(path)[0]), actor="a reader"), {})
        assert isinstance(planned, ChangePlan), planned
    else:
        assert read_settings(path, {}).cells


@pytest.mark.parametrize("text", each(blocks_of_all_pages("json")))
def test_json_is_a_message(text: str) -> None:
    tag = json.loads(text).get("type", "build.request.v1")
    kinds = {row.tag: row.message for row in MESSAGES}
    assert isinstance(msgspec.json.decode(text, type=kinds[tag]), kinds[tag])
    assert kinds["build.request.v1"] is BuildRequest


def curls() -> Iterator[tuple[str, str]]:
    """Requests of the documents to the HTTP API of `berth serve web`, a line each."""
    for where, text in SCRIPTS:
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("curl ") and API_ROOT in line:
                yield f"{where}: {line.split(API_ROOT)[1].split()[0]}", line


@pytest.fixture(scope="module")
def routes() -> list[Route]:
    nothing = cast("Any", NoneType())
    parts = (WebApi(nothing, nothing, nothing), WebActions(nothing, nothing, nothing))
    parts = (*parts, WebOperations(nothing, nothing, nothing), WebDrains(nothing))
    return [route for part in parts for route in part.routes()]


@pytest.mark.parametrize("line", each(curls()))
def test_a_request_by_curl_is_an_operation_of_the_http_api(line: str, routes: list[Route]) -> None:
    words = shlex.split(line)
    url = urlsplit(next(word for word in words if word.startswith("http")))
    body = words[words.index("-d") + 1] if "-d" in words else None
    method = words[words.index("-X") + 1] if "-X" in words else "GET" if body is None else "POST"
    scope = {"type": "http", "method": method, "path": url.path.removeprefix(API_ROOT)}
    found = next((route for route in routes if route.matches(scope)[0] is Match.FULL), None)
    assert found is not None, f"no route takes {method} {url.path}"
    whole = document(routes)
    operation = whole["paths"][found.path_format][method.lower()]
    assert ("requestBody" in operation) is (body is not None)
    if body is not None:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        validator = Draft202012Validator({**schema, "components": whole["components"]})
        assert [error.message for error in validator.iter_errors(json.loads(body))] == []


@pytest.mark.parametrize("name", _operations())
def test_an_operation_ends_with_statuses_that_berth_has(name: str) -> None:
    operation = _operations()[name]
    assert set(operation.errors) <= STATUSES.keys(), operation


# --- how the page of messages prints the bounds of a field


@pytest.mark.parametrize(("bound", "printed"), [(0, "0"), (0.0, "0"), (3600.0, "3600"), (0.5, "0.5")])
def test_an_integral_bound_is_printed_alike_whichever_module_was_imported_first(bound: float, printed: str) -> None:
    assert _type({"type": "number", "exclusiveMinimum": bound}) == f"number (> {printed})"


# --- the metrics that deploy/ queries of Prometheus exist


NAME = re.compile(r"\bberth_[a-z0-9_]+")


def test_every_metric_of_the_dashboard_and_the_rules_is_exported() -> None:
    """A metric that is renamed leaves a panel empty, and an alert silent, without a word."""
    known = set(NAME.findall((ROOT / "docs" / "reference" / "metrics.md").read_text()))
    files = (ROOT / "deploy" / "grafana" / "berth.json", *(ROOT / "deploy" / "prometheus").glob("*.yml"))
    requested = {name.removesuffix("_bucket") for file in files for name in NAME.findall(file.read_text())}
    assert requested - known == set()
    assert len(requested) > 20


# --- each alert names the place that says what to do, and has a test that sees it fire


def test_each_alert_has_a_runbook_that_there_is_and_a_test() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "berth.rules.yml").read_text())
    alerts = [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]
    assert len(alerts) > 20
    missing: list[str] = []
    for rule in alerts:
        page, _, anchor = rule["annotations"].get("runbook_url", "").partition("#")
        headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text() if page else "", re.MULTILINE)
        if not page.startswith("docs/operate/") or anchor not in {_anchor(heading) for heading in headings}:
            missing.append(rule["alert"])
    assert missing == []
    tests = yaml.safe_load((ROOT / "deploy" / "prometheus" / "berth.rules.test.yml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one["exp_alerts"]}
    assert {rule["alert"] for rule in alerts} - fired == set()


def _anchor(heading: str) -> str:
    """As GitHub makes it of a heading."""
    return re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")


# --- the filter of docs/start/first-filter.md, read out of the page and asked about hosts


TUTORIAL = (DOCS / "start" / "first-filter.md").read_text()


def block_of_the_tutorial(language: str) -> str:
    found = re.search(rf"^ *```{language}\n(.*?)^ *```$", TUTORIAL, re.MULTILINE | re.DOTALL)
    assert found is not None
    return textwrap.dedent(found.group(1))


def test_the_filter_of_the_tutorial_passes_odd_hosts() -> None:
    module: dict[str, object] = {"__name__": "my_filters"}
    exec(block_of_the_tutorial("python"), module)
    tried = module["OddHostsOnly"]()  # type: ignore[operator]
    assert tried.rejection_reason(SimpleNamespace(name="c1-00003"), None) is None
    assert tried.rejection_reason(SimpleNamespace(name="c1-00004"), None) == "host.even"


def test_the_settings_of_the_tutorial_are_settings(tmp_path: Path) -> None:
    (tmp_path / "berth.toml").write_text(block_of_the_tutorial("toml"))
    assert read_settings(tmp_path / "berth.toml", {}).scheduler.enabled_filters == ("ComputeFilter", "OddHostsOnly")
