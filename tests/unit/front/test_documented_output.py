"""The output that a console block of the documents shows is the output of berth."""

from __future__ import annotations

import pytest

from berth.commands.hosts import show_decision, show_hosts
from bus.contracts.build import HostRecord
from bus.contracts.operations import AdminState, HostAdminState
from tests.kit.documents import ROOT

UUID = "10000000-0000-4000-8000-000000000001"
HOST = "cell1-c1-00003"


def output_of(page: str) -> list[str]:
    """The lines of a page's console blocks that are no commands."""
    lines, is_console, goes_on = [], False, False
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if line.startswith("```"):
            is_console = line == "```console"
        elif is_console and line.strip():
            is_command = goes_on or line.startswith("$ ")
            goes_on = is_command and line.endswith("\\")
            if not is_command:
                lines.append(line.rstrip())
    return lines


def test_the_output_about_hosts_is_what_berth_prints(capsys: pytest.CaptureFixture[str]) -> None:
    def decided(state: AdminState, **more: object) -> HostAdminState:
        return HostAdminState(host_uuid=UUID, host=HOST, state=state, by="ann@admin1", **more)  # type: ignore[arg-type]

    show_decision(decided(AdminState.DISABLED))
    show_decision(decided(AdminState.FENCED, pending=AdminState.ENABLED, losses=12))
    contested = HostRecord(
        uuid=UUID,
        name=HOST,
        cell="cell1",
        service="c1",
        up=True,
        resources={"VCPU": (2, 16)},
        contested_by="c2",
    )
    show_hosts([contested])
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == output_of("howto/operate-hosts.md")
