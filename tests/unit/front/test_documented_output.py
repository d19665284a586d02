"""The output that a console block of the documents shows is the output of berth."""

from __future__ import annotations

import re

import pytest

from berth.audit.findings import findings
from berth.commands.audits import show_finding
from berth.commands.drain import show_begun, show_drain, show_progress
from berth.commands.hosts import show_decision, show_forgotten, show_forgotten_service, show_hosts
from bus.contracts.build import HostRecord
from bus.contracts.drains import DrainMoveState, DrainProgress, DrainState, DrainTarget
from bus.contracts.moves import MoveKind
from bus.contracts.operations import AdminState, HostAdminState, HostForgotten, ServiceForgotten
from tests.kit.documents import PAGES, ROOT
from tests.unit.front.test_findings import HELD, look

UUID = "10000000-0000-4000-8000-000000000001"
HOST = "cell1-c1-00003"
BY = "ann@admin1"
AUDIT, DRAINS, HOSTS = "docs/operate/audit.md", "docs/operate/drains.md", "docs/operate/hosts.md"
# The address that `berth web` prints: `tests/browser/pages.py` reads it.
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
    pages = {str(path.relative_to(ROOT)) for path in PAGES}
    assert {page for page in pages if output_of(page)} == {AUDIT, DRAINS, HOSTS} | READ_ELSEWHERE


def test_the_output_about_hosts_is_what_berth_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def decided(state: AdminState, **more: object) -> HostAdminState:
        return HostAdminState(host_uuid=UUID, host=HOST, state=state, by=BY, **more)  # type: ignore[arg-type]

    show_decision(decided(AdminState.DISABLED))
    show_decision(decided(AdminState.FENCED, fence=2, acknowledged=1))
    show_decision(decided(AdminState.FENCED, pending=AdminState.ENABLED, losses=12, fence=3, acknowledged=2))
    silent = HostRecord(uuid=UUID, name=HOST, announced=False, enabled=False, resources={"VCPU": (2, 16)})
    show_hosts([silent])
    show_forgotten(HostForgotten(host_uuid=UUID, host=HOST, removed=True))
    contested = HostRecord(
        uuid=UUID,
        name=HOST,
        cell="cell1",
        service="c1",
        up=True,
        resources={"VCPU": (2, 16)},
        contested_by="c2",
    )
    show_forgotten_service(ServiceForgotten(service="c1", cell="cell1", removed=True))
    show_hosts([contested])
    assert printed(capsys) == output_of(HOSTS)


def test_the_output_of_a_drain_is_what_berth_prints(capsys: pytest.CaptureFixture[str]) -> None:
    instances = 212

    def seen(state: DrainState, counts: dict[DrainMoveState, int]) -> DrainProgress:
        return DrainProgress(
            id="4f0c...",
            host="rack7",
            target=DrainTarget.AGGREGATE,
            kind=MoveKind.LIVE_MIGRATE,
            by=BY,
            reason="power",
            state=state,
            code="",
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
    assert [path for path in (*PAGES, *sources) if by_name.search(path.read_text())] == []
