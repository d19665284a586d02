"""Run tests in several processes that are forked when everything is collected: `-p tests.kit.prefork --processes 6`.

Processes that are started anew, as pytest-xdist's are, each import berth and collect all tests: four seconds of
processor apiece. These share what one process has collected. A process requests a file of tests
(`distribution.next_of`), sends the reports of each, and requests the next file before it runs the last test, so that
a fixture is torn down when pytest would tear it down. The test during which a process dies has failed; another process
runs what is left of its file.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import pytest
from _pytest._io import TerminalWriter
from _pytest.junitxml import xml_key
from _pytest.reports import TestReport

from tests.kit.distribution import borrows, next_of

# The messages of a process: a request for a file, the reports of a test, a warning, the error that ends it.
FILE, TEST, WARNING, BROKEN = "file", "test", "warning", "broken"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=1, metavar="N", help="run the tests in N forked processes")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.processes > 1 and not config.option.collectonly:
        config.pluginmanager.register(Prefork(config, config.option.processes), "prefork")


@dataclass(slots=True)
class Worker:
    """A forked process, as the first one sees it."""

    number: int
    pid: int
    left: list[int] = field(default_factory=list)  # tests that it was handed and has not reported


class Prefork:
    """The first process: it collects, hands out files, and reports."""

    def __init__(self, config: pytest.Config, processes: int) -> None:
        self._config = config
        self._processes = processes
        self._borrows = cache(partial(borrows, config.rootpath))
        self._files: dict[str, list[int]] = {}
        self._workers: dict[Connection, Worker] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed and not session.config.option.continue_on_collection_errors:
            return None  # pytest's own loop raises
        self.divide(session.items)
        if (reporter := self._config.pluginmanager.getplugin("terminalreporter")) is not None:
            reporter.showfspath = False  # tests of several files take turns
        self._config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all of them
        try:
            for number in range(min(self._processes, len(self._files))):
                self._fork(session, number)
            while self._workers:
                for ready in wait([*self._workers]):
                    assert isinstance(ready, Connection)
                    self._receive(session, ready)
        finally:
            for worker in self._workers.values():
                os.kill(worker.pid, signal.SIGTERM)
                os.waitpid(worker.pid, 0)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _fork(self, session: pytest.Session, number: int) -> None:
        assert threading.active_count() == 1, threading.enumerate()
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            for connection in (ours, *self._workers):
                connection.close()
            Served(session, number, theirs).run()
        theirs.close()
        self._workers[ours] = Worker(number, pid)

    def _receive(self, session: pytest.Session, connection: Connection) -> None:
        worker = self._workers[connection]
        try:
            kind, content = connection.recv()
        except (EOFError, ConnectionResetError):
            del self._workers[connection]
            connection.close()
            self._ended(session, worker, os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1]))
            return
        if kind == FILE:
            handed = self.next_for(session, worker)
            worker.left += handed
            connection.send(handed)
        elif kind == TEST:
            worker.left.pop(0)
            self._report(*content)
        elif kind == WARNING:
            self._config.hook.pytest_warning_recorded.call_historic(kwargs=content)
        else:
            raise RuntimeError(f"process {worker.number}:\n{content}")

    def divide(self, items: Sequence[pytest.Item]) -> None:
        """Note the tests of each file."""
        for at, item in enumerate(items):
            self._files.setdefault(path_of(item), []).append(at)

    def next_for(self, session: pytest.Session, worker: Worker) -> list[int]:
        """The tests of the next file of a process; none when all are handed out, or a failure ends the run."""
        if not self._files or session.shouldfail or session.shouldstop:
            return []
        return self._files.pop(next_of([*self._files], worker.number, self._processes, self._borrows))

    def _report(self, nodeid: str, location: tuple[str, int | None, str], reports: list[dict[str, Any]]) -> None:
        hook = self._config.hook
        hook.pytest_runtest_logstart(nodeid=nodeid, location=location)
        for data in reports:
            report = hook.pytest_report_from_serializable(config=self._config, data=data)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)

    def _ended(self, session: pytest.Session, worker: Worker, status: int) -> None:
        if status == 0:  # it stopped at a failure: the tests that it has left are not wanted
            return
        if not worker.left:
            raise RuntimeError(f"process {worker.number} ended with {status} after its tests")
        item = session.items[worker.left[0]]
        reason = f"process {worker.number} ended with {status} in this test"
        report = TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._report(item.nodeid, item.location, [data])
        again: dict[str, list[int]] = {}
        for at in worker.left[1:]:
            again.setdefault(path_of(session.items[at]), []).append(at)
        self._files = again | self._files
        if self._files:
            self._fork(session, worker.number)


def path_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class Terminal:
    """pytest-timeout writes a stack trace to it."""

    _tw = TerminalWriter(sys.__stderr__)


class Served:
    """A forked process: it runs the tests that it is handed."""

    def __init__(self, session: pytest.Session, number: int, connection: Connection) -> None:
        self._session = session
        self._config = session.config
        self._number = number
        self._connection = connection
        self._reports: list[dict[str, Any]] = []

    def run(self) -> NoReturn:
        status = 1
        try:
            self._become()
            for item, following in self._tests():
                self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                self._connection.send((TEST, (item.nodeid, item.location, self._reports)))
                self._reports = []
            self._session._setupstate.teardown_exact(None)
            self._config._ensure_unconfigure()
            status = 0
        except BaseException:  # reported by the first process
            self._connection.send((BROKEN, traceback.format_exc()))
        finally:
            os._exit(status)  # the functions registered for the end are the first process's

    def _tests(self) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
        """Each test with the one that follows it."""
        handed = self._request()
        while handed and not (self._session.shouldfail or self._session.shouldstop):
            at = handed.pop(0)
            handed = handed or self._request()
            yield self._session.items[at], self._session.items[handed[0]] if handed else None

    def _request(self) -> list[int]:
        self._connection.send((FILE, None))
        handed: list[int] = self._connection.recv()
        return handed

    def _become(self) -> None:
        """Have an output, temporary files and a report of its own."""
        plugins = self._config.pluginmanager
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # a forked file has one position for all
        capture.start_global_capturing()
        capture.suspend_global_capture()
        if (xml := self._config.stash.get(xml_key, None)) is not None:
            plugins.unregister(xml)
            del self._config.stash[xml_key]
        plugins.unregister(name="terminalreporter")
        plugins.register(Terminal(), "terminalreporter")
        factory = self._config._tmp_path_factory  # type: ignore[attr-defined]
        factory._basetemp = factory.getbasetemp() / f"process-{self._number}"
        factory._basetemp.mkdir(mode=0o700, exist_ok=True)
        plugins.unregister(name="prefork")
        plugins.register(self)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    @pytest.hookimpl
    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        category, lineno = warning_message.category, warning_message.lineno
        plain = warnings.WarningMessage(str(warning_message.message), category, warning_message.filename, lineno)
        recorded = {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}
        self._connection.send((WARNING, recorded))
