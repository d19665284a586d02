"""`berth` processes that are forked by a server which has imported it already: see `fork_server`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from berth.up.embedded.process import POLL_S, STOP_TIMEOUT_S, Account, GuardedProcess

ROOT = Path(__file__).parents[2]


class ForkServer:
    """One of this process of pytest, started when it is first needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def ask(self, **requested: Any) -> dict[str, Any]:
        """Send a request; returns the answer."""
        with self._lock:
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "tests.kit.fork_server"],
                    cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                    env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # a process with threads is not to be forked
                )  # fmt: skip
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(requested) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            return answer

    def close(self) -> None:
        """End it, and what it forked."""
        if self._process is not None:
            self._process.communicate(timeout=STOP_TIMEOUT_S)
        self._process = None


server = ForkServer()


class ForkedProcess(GuardedProcess):
    """`python -m berth ARGUMENTS`, forked; made and used as a GuardedProcess is."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        account: Account,
        stdin: str = os.devnull,
        stdout: str = "",
    ) -> None:
        assert list(command[:3]) == [sys.executable, "-m", "berth"] and account.name is None
        sent = {"stdin": stdin, "stdout": stdout or str(log), "stderr": str(log)}
        self.pid = server.ask(arguments=list(command[3:]), env=dict(env), cwd=str(cwd), **sent)["pid"]
        self.log = log

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def status(self) -> int | None:
        status: int | None = server.ask(poll=self.pid)["status"]
        return 128 - status if status is not None and status < 0 else status

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        self._signal(signal.SIGTERM)
        if not self.wait(timeout_s):
            self.kill()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.wait(STOP_TIMEOUT_S)

    def wait(self, timeout_s: float) -> bool:
        """Until it has ended; False when it has not in time."""
        until = time.monotonic() + timeout_s
        while self.running:
            if time.monotonic() > until:
                return False
            time.sleep(POLL_S)
        return True

    def _signal(self, number: signal.Signals) -> None:
        if self.running:  # nothing but a poll takes the pid from it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)


def run_berth(*arguments: str, env: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, as `subprocess.run` would with its output captured."""
    with tempfile.TemporaryDirectory(prefix="berth-fork-") as name:
        out, log = Path(name) / "out", Path(name) / "err"
        command = [sys.executable, "-m", "berth", *arguments]
        process = ForkedProcess(command, env=env, cwd=ROOT, log=log, account=Account(), stdout=str(out))
        if not process.wait(timeout_s):
            process.kill()
            raise subprocess.TimeoutExpired(command, timeout_s, out.read_text(), log.read_text())
        status = process.status
        assert status is not None
        return subprocess.CompletedProcess(command, status, out.read_text(), log.read_text())
