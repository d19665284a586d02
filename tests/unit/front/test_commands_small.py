"""An odd port, and a release that asks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import typer

from berth.audit.quarantine import InCells
from berth.commands import safety
from berth.commands.run import _http
from berth.settings import Settings
from cell_conductor.domain.report import UnexplainedKind

INSTANCES = tuple(f"11111111-2222-4333-8444-{n:012d}" for n in range(9))


@pytest.mark.xfail(strict=True, reason="Found B24")
def test_an_odd_digit_is_no_port() -> None:

    with pytest.raises(typer.BadParameter):
        _http(":²")


@pytest.mark.xfail(strict=True, reason="Found A3")
async def test_release_by_service_asks_before_it_destroys_in_all_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of services are per cell: both cells have a `c1-compute`; the operator has looked at one of them."""

    def record(cell: str, n: int) -> Any:
        machine = SimpleNamespace(
            uuid=INSTANCES[n], host_uuid=INSTANCES[n], attempt=1, kind=UnexplainedKind.QUARANTINED
        )
        return SimpleNamespace(machine=machine, service="compute", verdict="")

    async def read(_: Any, cell: str | None = None) -> InCells:
        return InCells({"a": [record("a", 0)], "b": [record("b", n) for n in range(1, 9)]}, {})

    told: list[Any] = []

    async def decide(_: Any, machines: Any, verdict: str, by: str) -> Any:
        told.append((verdict, {cell: len(of) for cell, of in machines.items()}))
        return {cell: [(one.host_uuid, one.uuid) for one in of] for cell, of in machines.items()}, {}

    asked: list[str] = []
    monkeypatch.setattr(safety.records, "read", read)
    monkeypatch.setattr(safety.records, "decide", decide)
    monkeypatch.setattr(safety, "environment", lambda _: None)
    monkeypatch.setattr(typer, "confirm", lambda text, **_: asked.append(text) or False)
    await safety.release(Settings(), None, True, "compute", None, "me", False)
    assert asked and not told, f"destroyed without a question: {told}"
