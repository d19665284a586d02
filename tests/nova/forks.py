"""Servers that start in a moment: a process that has imported all that they need makes them by fork.

`Forks` starts such a process; `serve` is its main function. Used by Nova's interpreter and by berth's, so it imports
nothing of either.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_S = 0.02
END_S = 30.0
LOCKED_S = 60.0


def wait_for_locks() -> None:
    """A database that another process writes to is waited for: a test's SQLite files are shared with its schedulers."""
    connect = sqlite3.dbapi2.connect

    def patient(*arguments: Any, **named: Any) -> sqlite3.Connection:
        found: sqlite3.Connection = connect(*arguments, **{"timeout": LOCKED_S, **named})
        return found

    sqlite3.dbapi2.connect = patient


def serve(child: Callable[[dict[str, Any]], None]) -> None:
    """Fork for each line of standard input, {"log": PATH, ...}, and print the process's number; until it closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    for line in sys.stdin:
        given = json.loads(line)
        number = os.fork()
        if number:
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()
        else:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os._exit(_run(child, given))


def _run(child: Callable[[dict[str, Any]], None], given: dict[str, Any]) -> int:
    log = os.open(given["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, handle in ((0, nothing), (1, log), (2, log)):
        os.dup2(handle, number)
    try:
        child(given)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class Fork:
    """A server that was made by fork; its parent is another process."""

    def __init__(self, number: int) -> None:
        self.number = number

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return Path(f"/proc/{self.number}").exists()

    def end(self, *signals: int) -> None:
        """Send it these signals, one after the other, as long as it runs on for END_S; the last one is SIGKILL."""
        for number in (*signals, signal.SIGKILL):
            if not self.runs:
                return
            os.kill(self.number, number)
            until = time.monotonic() + END_S
            while self.runs and time.monotonic() < until:
                time.sleep(POLL_S)


class Forks:
    """The process that makes them. script: calls `serve`. log: of what it writes itself."""

    def __init__(self, python: str, script: Path, log: Path, env: dict[str, str]) -> None:
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [python, str(script)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )

    def start(self, log: Path, **given: Any) -> Fork:
        """Another server, which writes there."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"log": str(log), **given}) + "\n")
        self._process.stdin.flush()
        return Fork(int(self._process.stdout.readline()))

    def close(self) -> None:
        """No more of them."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
