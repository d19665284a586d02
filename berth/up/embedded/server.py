"""The common parts of the private servers: a place for their files, a guarded process, start, stop and kill."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Self

from berth.up.embedded.process import STOP_TIMEOUT_S, GuardedProcess, Workspace


class PrivateServer(ABC):
    """One server of ours. `with Server() as server: server.url()`.

    directory: keep data and logs there (None: temporary); another server made on it later goes on with its data.
    """

    stop_timeout_s = STOP_TIMEOUT_S

    def __init__(self, directory: Path | None, prefix: str) -> None:
        self._work = Workspace(directory, prefix)
        self._process: GuardedProcess | None = None

    def start(self) -> Self:
        """Start the server on its data, which are made if there are none, and wait until it answers.

        A server that does not start leaves nothing behind: a temporary directory goes. Raises ServerFailed.
        """
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def restart(self) -> None:
        """Start a server that ended on its data and port. Raises ServerFailed; then nothing of it runs."""
        self.kill()  # what is left of it
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """Stop the server and, when its directory was temporary, remove it."""
        self.shut_down()
        self._process = None
        self._clear()
        self._work.remove()

    def shut_down(self) -> None:
        """Stop the server in good order and keep its data: `start` brings it back on the same port."""
        if self._process is not None:
            self._process.stop(timeout_s=self.stop_timeout_s)

    def kill(self) -> None:
        """End the server as a crash would; `start` brings it back on the same data and port."""
        if self._process is not None:
            self._process.kill()

    @property
    def pid(self) -> int:
        """The server's process id; 0 when it does not run."""
        return self._process.pid if self._process is not None and self._process.running else 0

    @property
    def log(self) -> Path:
        """The server's standard output and error."""
        assert self._process is not None, "never started"
        return self._process.log

    @property
    def status(self) -> int | None:
        """How its process ended: the exit status, 128 and more for a signal; None while it runs."""
        return self._process.status if self._process is not None else None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @abstractmethod
    def _start(self) -> None:
        """Make missing data, spawn the process, wait until it answers."""

    def _clear(self) -> None:
        """The other things to remove when the server is stopped for good."""
        return
