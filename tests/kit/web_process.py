"""A `berth serve web` as a process, which the commands of a test call."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from berth.config.ports import free_port
from berth.up.embedded.process import Account
from tests.kit.forks import ROOT, ForkedProcess
from tests.kit.waiting import wait_until

START_S = 60.0


class WebProcess:
    """Started when its address is first asked for; without tokens, on loopback."""

    def __init__(self, env: Mapping[str, str], directory: Path) -> None:
        """env: the settings that it has, as variables. directory: of its log."""
        self._env = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")} | dict(env)
        self.log = directory / "web.log"
        self._process: ForkedProcess | None = None
        self._port = 0

    @property
    def variables(self) -> dict[str, str]:
        """The variables by which a command finds it."""
        if self._process is None:
            self._port = free_port()
            listen = ("--listen", f"127.0.0.1:{self._port}")
            command = [sys.executable, "-m", "berth", "serve", "web", *listen]
            self._process = ForkedProcess(command, env=self._env, cwd=ROOT, log=self.log, account=Account())
            wait_until(self._listens, START_S)
        return {"BERTH_URL": f"http://127.0.0.1:{self._port}"}

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.running, self.log.read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1.0):
            return True
        return False

    def stop(self) -> None:
        """End it, if it was started."""
        if self._process is not None:
            self._process.stop()
        self._process = None


@contextlib.contextmanager
def served(env: Mapping[str, str], directory: Path) -> Iterator[dict[str, str]]:
    """The variables of such a process, for as long as the block runs."""
    web = WebProcess(env, directory)
    try:
        yield web.variables
    finally:
        web.stop()
