"""A process of a real Nova that a test talks to (`tests/integration/nova_scheduler/peer.py`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.sources import ROOT

PEER = ROOT / "tests" / "integration" / "nova_scheduler" / "peer.py"
PATIENCE_S = 120.0
PYTHONS = (os.environ.get("BERTH_NOVA_PYTHON", ""), str(ROOT / ".berth" / "nova" / "bin" / "python"))
PYTHON = next((path for path in PYTHONS if path and Path(path).exists()), "")
needs_nova = pytest.mark.skipif(not PYTHON, reason="no Nova: set BERTH_NOVA_PYTHON to the Python of its virtualenv")


class NovaPeer:
    """The process, its commands and what it says."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.said: list[dict[str, Any]] = []
        self._reading = asyncio.create_task(self._read())
        self.ready = asyncio.Event()

    async def do(self, command: str, **given: object) -> dict[str, Any]:
        """The outcome of a command: `result`, or what was `raised`."""
        assert self._process.stdin is not None
        number = next(self._ids)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps({"id": number, "do": command, **given}).encode() + b"\n")
        async with asyncio.timeout(PATIENCE_S):
            return await waiting

    def taken(self, method: str) -> list[dict[str, Any]]:
        """The calls that a server has taken."""
        return [one for one in self.said if one.get("taken") == method]

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if not line.startswith(b"{"):
                continue
            said = json.loads(line)
            self.said.append(said)
            if said.get("ready"):
                self.ready.set()
            if "id" in said:
                self._waiting.pop(said["id"]).set_result(said)
        await self._process.wait()
        self.ready.set()

    async def end(self) -> None:
        """Kill it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        await self._reading


@contextlib.asynccontextmanager
async def nova_peer(role: str, url: str, **options: object) -> AsyncIterator[NovaPeer]:
    """A `client` or a `server` on the broker at this URL. options: of `[oslo_messaging_rabbit]`."""
    given = [f"{name}={json.dumps(value)}" for name, value in options.items()]
    transport_url = url.replace("amqp://", "rabbit://")
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            PYTHON, str(PEER), role, transport_url, *given,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
        )  # fmt: skip
        peer = NovaPeer(process)
        try:
            async with asyncio.timeout(PATIENCE_S):
                await peer.ready.wait()
            if process.returncode is not None:
                errors.seek(0)
                pytest.fail(errors.read()[-4000:].decode(errors="replace"))
            yield peer
        finally:
            await peer.end()
