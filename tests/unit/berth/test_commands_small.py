"""An odd port, and a release that asks."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import asyncpg
import pytest
import typer
from typer.testing import CliRunner

from berth.cli.claims import checks as audits
from berth.cli.claims import quarantine as safety
from berth.cli.common import Exit, Stop, explain, host_and_port
from berth.cli.fleet import host_metrics
from berth.cli.instance import actions as moves
from berth.cli.main import app
from berth.cli.objects import edits, objects
from berth.cli.output import Form
from berth.cli.site import databases, nova, run
from berth.client.types import (
    BreakersAfterReset,
    BreakersReset,
    BreakerView,
    ChangeBody,
    MetricsBody,
    MetricsPublished,
    QuarantineDecided,
    QuarantineDecision,
    QuarantinedMachine,
    QuarantinePage,
)
from berth.config.settings import Settings, TelemetrySettings
from berth.config.site import Site
from berth.object_changes import ObjectEdit
from berth.up.embedded.process import ServerMissing
from bus.contracts.host_metrics import HostMetric, HostMetricsRecord
from bus.contracts.objects import ChangedObject, ObjectKind, ObjectsChanged, StoredObject
from bus.service.environment import Environment
from bus.transport import BusUnavailable
from tests.kit.api_client import CONTEXT, answered_by

INSTANCES = tuple(f"11111111-2222-4333-8444-{n:012d}" for n in range(9))

UUID = INSTANCES[0]


def test_an_odd_digit_is_no_port() -> None:

    with pytest.raises(typer.BadParameter):
        host_and_port(":²", "--http")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (asyncpg.InsufficientPrivilegeError("permission denied"), Exit.USAGE, "database.forbidden"),
        (asyncpg.UndefinedTableError("no table"), Exit.UNAVAILABLE, "database.unprepared"),
        (asyncpg.CannotConnectNowError("starting"), Exit.UNAVAILABLE, "database.unavailable"),
    ],
)
def test_what_the_database_refuses_is_a_sentence(error: Exception, status: int, code: str) -> None:
    """`berth db list` by a user without rights was a traceback."""
    stop = explain(error)
    assert stop is not None and (stop.status, stop.code) == (status, code)
    assert explain(asyncpg.DivisionByZeroError("x")) is None


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TimeoutError("late"), "timeout"),
        (ServerMissing("rabbitmq"), "server.missing"),
        (BusUnavailable("away"), "bus.unavailable"),
    ],
)
def test_what_ends_a_command_has_its_code(error: Exception, code: str) -> None:
    stop = explain(error)
    assert stop is not None and stop.code == code


class TwoCells:
    """Both cells have a service `compute` with machines in quarantine, and what is asked and decided."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, terminal: bool, answer: bool) -> None:
        self.told: list[Any] = []
        self.asked: list[str] = []

        answered_by(monkeypatch, self, safety)
        monkeypatch.setattr(typer, "confirm", lambda text, **_: self.asked.append(text) or answer)
        monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: terminal))

    async def list_quarantine(self, *, cell: str | None = None, **_: object) -> QuarantinePage:
        machines = [self.machine("a", 0), *(self.machine("b", n) for n in range(1, 9))]
        found = tuple(one for one in machines if cell in (None, one.cell))
        return QuarantinePage(found, len(found))

    async def list_breakers(self, *, cell: str | None = None, **_: object) -> tuple[BreakerView, ...]:
        return tuple(
            BreakerView(cell=name, service="compute", open=True, tripped_at=1.0, lost=6, quarantined=0, over=0)
            for name in ("a", "b")
            if cell in (None, name)
        )

    async def decide_quarantine(self, body: QuarantineDecision) -> QuarantineDecided:
        self.told.append((body.decision, dict(Counter(one.cell for one in body.machines))))
        return QuarantineDecided(tuple(one.instance_uuid for one in body.machines), ())

    async def reset_breakers(self, body: BreakersReset) -> BreakersAfterReset:
        self.told.append([one.tripped for one in body.breakers])
        return BreakersAfterReset(body.breakers, ())

    @staticmethod
    def machine(cell: str, n: int) -> QuarantinedMachine:
        return QuarantinedMachine(
            cell=cell, host_uuid=INSTANCES[n], instance_uuid=INSTANCES[n], attempt=1, service="compute",
            kind="quarantined", reason="", first_seen=1.0, last_seen=2.0,
        )  # fmt: skip


OF_SERVICE = safety.MachineOptions(service="compute")
OF_ONE_CELL = safety.MachineOptions(service="compute", cell="b")
DESTROY = partial(safety.destroy, CONTEXT, options=OF_SERVICE)
DESTROY_IN_CELL = partial(safety.destroy, CONTEXT, options=OF_ONE_CELL)
DESTROY_NAMED = partial(safety.destroy, CONTEXT, [INSTANCES[0], INSTANCES[1]], options=safety.MachineOptions())
RESET = partial(safety.reset, CONTEXT, "compute")


@pytest.mark.parametrize(
    ("command", "terminal", "answer", "code"),
    [
        (DESTROY, True, True, "service.ambiguous"),  # the operator has looked at one of them
        (RESET, True, True, "service.ambiguous"),
        (partial(DESTROY, yes=True), True, True, "service.ambiguous"),
        (DESTROY_IN_CELL, True, False, "command.declined"),
        (DESTROY_IN_CELL, False, True, "command.unconfirmed"),
        (DESTROY_NAMED, True, False, "command.declined"),
        (partial(RESET, cell="b"), True, False, "command.declined"),
        (partial(RESET, cell="b"), False, True, "command.unconfirmed"),
    ],
)
async def test_nothing_is_destroyed_in_a_cell_that_nobody_named_or_unasked(
    monkeypatch: pytest.MonkeyPatch, command: Any, terminal: bool, answer: bool, code: str
) -> None:
    cells = TwoCells(monkeypatch, terminal=terminal, answer=answer)
    with pytest.raises(Stop) as stop:
        await command()
    assert (stop.value.code, cells.told) == (code, [])


async def test_the_question_counts_by_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = TwoCells(monkeypatch, terminal=True, answer=True)
    await DESTROY_NAMED()
    assert cells.told == [("destroy", {"a": 1, "b": 1})]
    assert "2 machines" in cells.asked[0] and "a 1" in cells.asked[0] and "b 1" in cells.asked[0]
    await DESTROY_IN_CELL(yes=True)
    await RESET(cell="b", yes=True)
    assert len(cells.asked) == 1 and cells.told[1:] == [("destroy", {"b": 8}), [("b", "compute", 1.0)]]


async def test_a_disk_is_replaced_and_a_book_repaired_after_a_question_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a server nor a database is there: nothing is reached."""
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    rebuild = moves.rebuild(CONTEXT, INSTANCES[0], "image", request=cast(Any, None))
    for command in (rebuild, audits.audit(Settings(), follow=True, repair=True)):
        with pytest.raises(Stop) as stop:
            await command
        assert stop.value.code == "command.unconfirmed"


async def test_what_another_operator_made_after_the_question_is_not_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flavor that came between the question and the answer was deleted with those that the question named."""
    file = tmp_path / "objects.toml"
    file.write_text("[flavors.kept.resources]\nVCPU = 1\n")
    sent: list[ChangeBody] = []

    class Api:
        async def change_objects(self, body: ChangeBody) -> ObjectsChanged:
            sent.append(body)
            gone = ChangedObject(kind=ObjectKind.FLAVOR, name="old", before={})
            return ObjectsChanged(revision=1, changed=(gone,))

    answered_by(monkeypatch, Api(), objects)
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: True)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    await objects.apply(CONTEXT, file, prune=True, decision=objects.ForcedOptions())
    asked, done = sent
    assert asked.dry_run and asked.prune and not (done.dry_run or done.prune)
    assert [(one.name, one.body is None) for one in done.changes] == [("kept", False), ("old", True)]


@pytest.mark.parametrize(
    ("words", "known", "field", "then"),
    [
        ("flavor unset x --project p", {"projects": ["p"]}, "projects", "flavor.last_project"),
        ("flavor set x --project p --every-project", {"projects": ["p"]}, "projects", "usage"),
        ("flavor set x --every-project", {"projects": ["p"]}, "projects", []),
        ("flavor unset x --project p", {"projects": ["p", "q"]}, "projects", ["q"]),
        ("flavor set x --vcpus 2", {"projects": []}, "projects", []),
        ("aggregate unset x --zone", {"hosts": ["h"]}, "hosts", ["h"]),
        ("aggregate set x --host i", {"hosts": ["h"]}, "hosts", ["h", "i"]),
        ("aggregate set x --hosts-in-placement", {"hosts": ["h"]}, "hosts", None),
    ],
)
def test_an_edit_leaves_what_it_does_not_name(
    monkeypatch: pytest.MonkeyPatch, words: str, known: dict[str, Any], field: str, then: object
) -> None:
    after: list[object] = []

    async def changed(_: typer.Context, wanted: ObjectEdit, __: object) -> None:
        on_record = StoredObject(kind=wanted.kind, name=wanted.name, body=known, version=1)
        after.append(wanted.edit(on_record).get(field))

    monkeypatch.setattr(edits, "change_objects", changed)
    done = CliRunner().invoke(app, words.split())
    if isinstance(then, str):
        assert done.exit_code == Exit.USAGE and (then == "usage" or then in done.output), done.output
    else:
        assert done.exit_code == 0 and after == [then], done.output


@pytest.mark.parametrize(
    ("requested", "port", "listens"),
    [
        (None, None, None),
        (None, 0, ("127.0.0.1", 0)),
        (("::1", 0), None, ("::1", 0)),
        (("::1", 0), 0, ("::1", 0)),
    ],
)
def test_a_worker_answers_where_it_is_told_to(
    requested: tuple[str, int] | None, port: int | None, listens: tuple[str, int] | None
) -> None:
    telemetry = TelemetrySettings(http_host="127.0.0.1", http_port=port)
    assert run.health_address(requested, Settings(telemetry=telemetry)) == listens


@pytest.mark.parametrize(
    ("words", "hints"), [("", True), ("-o json", False), ("--dry-run", False), ("--dry-run -o json", False)]
)
def test_what_comes_after_a_restore_is_said_to_persons(
    monkeypatch: pytest.MonkeyPatch, words: str, hints: bool
) -> None:
    async def restored(url: str, _: Path, *, dry_run: bool) -> str:
        return f"{url} {dry_run}"

    printed: list[str] = []
    monkeypatch.setattr(databases, "put_back", restored)
    monkeypatch.setattr(databases, "_print_manifest", lambda manifest, _: printed.append(manifest))
    monkeypatch.setenv("BERTH_DATABASE__URL", "postgresql://h/berth")
    done = CliRunner().invoke(app, ["restore", "somewhere", *words.split()])
    assert done.exit_code == 0, done.output
    assert printed == [f"postgresql://h/berth {'--dry-run' in words}"]
    assert ("Start the workers" in done.output) is hints


@pytest.mark.parametrize(("seen", "code"), [((2.0,), None), ((1.0, 2.0), None), ((1.0,), "metrics.not_taken")])
async def test_a_number_that_an_operator_gives_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seen: tuple[float, ...], code: str | None
) -> None:
    ats = itertools.chain(seen, itertools.repeat(seen[-1]))

    class Api:
        async def publish_metrics(self, host: str, body: MetricsBody) -> MetricsPublished:
            return MetricsPublished(UUID, 2.0)

        async def show_metrics(self, host: str) -> tuple[HostMetricsRecord, ...]:
            metric = HostMetric(name="load", value=1.0, at=next(ats), source="me", fresh=True)
            return (HostMetricsRecord(host_uuid=UUID, host="h", cell="c", metrics=(metric,)),)

    monkeypatch.setattr(host_metrics, "LOOK_AGAIN_S", 0.001)
    monkeypatch.setattr(host_metrics, "SEEN_WITHIN_S", 0.005)
    answered_by(monkeypatch, Api(), host_metrics)
    command = host_metrics.host_metrics(CONTEXT, "h", ["load=1"], "me", Form.JSON)
    if code is None:
        await command
        assert '"value": 1.0' in capsys.readouterr().out
    else:
        with pytest.raises(Stop) as refused:
            await command
        assert refused.value.code == code


async def test_a_service_within_another_ends_when_it_is_drained() -> None:
    part = nova._Part(cast("Any", SimpleNamespace(run=asyncio.Event.wait)))
    running = asyncio.create_task(part.run())
    async with asyncio.timeout(60.0):
        await part.drain()
    await running


def test_a_front_of_nova_without_tokens_has_a_page_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[nova.ShownAt | None] = []

    def ran(_: Site, at: nova.ShownAt | None, __: object) -> int:
        shown.append(at)
        return 0

    monkeypatch.setattr(nova, "_run", ran)
    done = CliRunner().invoke(app, ["nova", "serve", "--memory", "--page", "127.0.0.1:8080"])
    assert done.exit_code == 0, done.output
    assert shown == [nova.ShownAt("127.0.0.1", 8080, None)]


OF_TRIAL = """
[nova]
transport_url = "rabbit://n:n@127.0.0.1:1/nova"
api.cells = { "ce110000-0000-4000-8000-000000000001" = ["*"] }
trial.placement_url = "%s"
"""


@pytest.mark.parametrize(
    ("address", "status", "says"),
    [("http://127.0.0.1:2", 0, '"would fit": 0'), ("http://", 2, "nova.trial.placement_url")],
    ids=["it ends", "no address"],
)
def test_a_trial_says_what_it_has_counted(
    address: str, status: int, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ran(here: Site, _: object, made: Callable[[Environment], object], __: object) -> int:
        async def build() -> None:
            made(here.environment("trial", takes_cells=False))

        asyncio.run(build())
        return 0

    monkeypatch.setattr(nova, "_run", ran)
    file = tmp_path / "berth.toml"
    file.write_text(OF_TRIAL % address)
    done = CliRunner().invoke(app, ["--config", str(file), "nova", "trial", "-o", "json"])
    assert (done.exit_code, says in done.output) == (status, True), done.output


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        (b"[DEFAULT]\ntransport_url = rabbit://n@r/nova\n", 0, 'transport_url = "rabbit://n@r/nova"'),
        (b"[scheduler]\nworkers = 2\n", 1, "[scheduler] workers"),
        (b"\xff", 2, "nova.conf_unreadable"),
        (None, 2, "nova.conf_unreadable"),
    ],
    ids=["all", "not all", "no text", "no file"],
)
def test_a_nova_conf_as_settings(text: bytes | None, status: int, says: str, tmp_path: Path) -> None:
    file = tmp_path / "nova.conf"
    if text is not None:
        file.write_bytes(text)
    done = CliRunner().invoke(app, ["nova", "settings", str(file)])
    assert (done.exit_code, says in done.output) == (status, True), done.output


@pytest.mark.parametrize(
    ("words", "begins"), [("conductor --cell cell1", "conductor-cell1-"), ("scheduler", "scheduler-")]
)
def test_a_worker_is_named_by_its_role_and_cell(monkeypatch: pytest.MonkeyPatch, words: str, begins: str) -> None:
    names: list[str] = []

    def ran(*_: object, process: str, **__: object) -> int:
        names.append(process)
        return 0

    for name in ("_build", "_join"):
        monkeypatch.setattr(run, name, lambda *_, **__: None)
    monkeypatch.setattr(run, "database_of", Site)
    monkeypatch.setattr(run, "run_process", ran)
    done = CliRunner().invoke(app, ["run", *words.split()])
    assert done.exit_code == 0, done.output
    assert [name.startswith(begins) for name in names] == [True]
