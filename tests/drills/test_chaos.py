"""A short chaos run: builds, gangs, actions and a drain; every role and both servers are killed; nothing is lost."""

from __future__ import annotations

import asyncio
import io
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from lab.chaos.plan import BROKER, DATABASE, ChaosPlan, FaultKind, FaultSpec
from lab.chaos.report import render
from lab.chaos.run import chaos

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]

DECK = (
    *(
        FaultSpec(FaultKind.KILL, role, 1)
        for role in ("scheduler", "placement", "conductor", "compute", BROKER, DATABASE)
    ),
    *(FaultSpec(FaultKind.CUT, server, 1) for server in (BROKER, DATABASE)),
)


async def test_nothing_is_lost_doubled_leaked_or_overcommitted(tmp_path: Path) -> None:
    whole = ChaosPlan()
    processes = msgspec.structs.replace(whole.processes, cells=("cell1",), computes_per_cell=1)
    plan = ChaosPlan(
        boots=400,
        in_flight=40,
        population=150,
        fault_every_s=0.7,
        most_faults=len(DECK),
        seed=1,
        deck=DECK,
        processes=processes,
        early_deletes=0.05,
        actions=120,
        gangs=0.05,
        drains=1,
    )
    console = Console(file=io.StringIO(), width=120)
    report = await chaos(plan, tmp_path, console)
    render(report, console)
    table = console.file.getvalue()  # type: ignore[attr-defined]
    assert report.faults_total >= 3, table
    assert (report.lost, report.doubled, report.leaked, report.overcommitted) == (0, 0, 0, 0), table
    assert report.at_rest and all(verdict.holds for verdict in report.verdicts), table
    assert report.bugs == (), table
    assert report.requests == report.wanted == report.active + report.deleted + report.failed, table
    assert report.wanted > 400 and report.gangs > 0, table
    assert report.actions == 120 == sum(report.actions_by_result.values()), table
    assert report.actions_by_result["done"] > 0, table
    assert report.drains == 1, table
    assert report.deletes > 0


def of_run(directory: Path) -> dict[int, str]:
    """The processes that name this directory in their environment or arguments, with their states (T: stopped)."""
    found: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            told = process.joinpath("environ").read_bytes() + process.joinpath("cmdline").read_bytes()
            if str(directory).encode() in told:
                found[int(process.name)] = process.joinpath("stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
    return {pid: state for pid, state in found.items() if state != "Z"}


async def test_a_run_that_gets_sigterm_leaves_no_process_also_while_it_has_paused_one(tmp_path: Path) -> None:
    """Two schedulers and a conductor ran on."""
    options = ("--boots", "20000", "--fault-every", "0.5", "--only", "pause", "--seed", "1", "--logs", str(tmp_path))
    run = await asyncio.create_subprocess_exec(sys.executable, "-m", "lab.chaos", *options)
    async with asyncio.timeout(240):
        while "T" not in of_run(tmp_path).values():
            assert run.returncode is None
            await asyncio.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        assert await run.wait() == 128 + signal.SIGTERM
    assert of_run(tmp_path) == {}
