"""Commands whose client of the HTTP API is an object of the test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any, cast

import pytest
import typer

CONTEXT = cast("typer.Context", None)  # of a command that is called with a client of its own


def answered_by(monkeypatch: pytest.MonkeyPatch, client: Any, *commands: ModuleType) -> None:
    """Have the commands of these modules call this client."""

    @contextlib.asynccontextmanager
    async def connected(_: typer.Context) -> AsyncIterator[Any]:
        yield client

    for module in commands:
        monkeypatch.setattr(module, "connected", connected)
