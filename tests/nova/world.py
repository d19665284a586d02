"""The servers of one of Nova's functional tests: a vhost, berth, and who answers topic `scheduler`.

Run by Nova's own interpreter, not by berth's. Each test has its own, so nothing is to be reset between two.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from forks import Fork, Forks

START_TIMEOUT_S = 120.0
POLL_S = 0.02
RESTART = "restart-broker"  # a file that `suite.py` waits for
HERE = Path(__file__).parent

PLACEMENT_CONF = "[api]\nauth_strategy = noauth2\n[oslo_policy]\nenforce_new_defaults = False\n"
# Who calls Nova's API: its own test fixtures take user, project and roles from these headers, in Keystone's place.
ADMINISTRATOR = {
    "HTTP_X_AUTH_USER": "admin",
    "HTTP_X_AUTH_PROJECT_ID": "6f70656e737461636b20342065766572",
    "HTTP_X_ROLES": "reader,member,admin",
}

# {"main": the URL of the one with Nova's services, "stock": of the one with the fallback's nova-scheduler, which
# may be left out, "bus": of berth's own, for a test that starts and kills its schedulers itself}
Vhosts = dict[str, str]
App = Callable[[dict[str, Any], Any], Iterable[bytes]]


class NotStarted(Exception):
    """A server of the test's world did not come up."""


class Quiet(WSGIRequestHandler):
    """Writes no log."""

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


class Threading(ThreadingMixIn, WSGIServer):
    """A thread for each request."""

    daemon_threads = True


class ComputeApi:
    """Nova's API on a real port, for a process that is not the test's; 503 until the test has made its API."""

    def __init__(self) -> None:
        self.app: App | None = None
        self._caller = threading.local()
        self._server = make_server("127.0.0.1", 0, self._call, Threading, Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v2.1"
        threading.Thread(target=self._server.serve_forever, name="compute-api", daemon=True).start()

    def _call(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if self.app is None:
            start_response("503 Service Unavailable", [("Content-Length", "0")])
            return [b""]
        self._caller.is_front = True
        return self.app(environ | ADMINISTRATOR, start_response)

    @property
    def calls(self) -> bool:
        """Whether this thread works on a request that came here."""
        return getattr(self._caller, "is_front", False)


class Servers:
    """The processes of one test.

    urls: of its vhosts. cell: the uuid of the one that has the hosts. mode: `front` (berth answers topic `scheduler`,
    and relays what it does not decide to a stock nova-scheduler) or `apart` (a stock nova-scheduler does).
    """

    def __init__(self, mode: str, forks: tuple[Forks, Forks], urls: Vhosts, cell: str, folder: Path) -> None:
        self.mode = mode
        self.urls = urls
        self._of_berth, self._of_nova = forks
        self._cell = cell
        self.folder = Path(tempfile.mkdtemp(prefix="world-", dir=folder))
        self.compute: ComputeApi | None = None  # it has threads, so it belongs to the process of the test
        self._scheduler: Fork | None = None  # a stock one
        self._cloud: dict[str, Any] = {}  # what the schedulers were told
        self._front = self.folder / "front.json"
        address = f"127.0.0.1:{free_port()}"
        self.placement = f"http://{address}"
        (self.folder / "placement.conf").write_text(PLACEMENT_CONF)
        self._log = self.folder / "log"
        settings = {"placement": {"rest": {"conf_dir": str(self.folder)}}, **self._bus()}
        self._berth = self._of_berth.start(self._log, settings=settings, api=address, front=str(self._front))

    def wait_placement(self) -> None:
        """Until placement answers. Raises NotStarted."""
        for _ in self._until(self._berth, "berth"):
            try:
                with urllib.request.urlopen(f"{self.placement}/", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                pass

    def open(self) -> None:
        """In the process of the test, before it begins."""
        self.compute = ComputeApi()

    def start_scheduler(self, cloud: Callable[[], dict[str, Any]]) -> None:
        """Have topic `scheduler` served. cloud: what a nova-scheduler outside the test's process has to know."""
        self._cloud = cloud()
        if "bus" in self.urls:
            return
        if self.mode != "front":
            self._scheduler = self.start_stock()
            return
        if "stock" in self.urls:
            self._scheduler = self._fork_stock("stock")
        self._tell(self._front)

    def start_stock(self) -> Fork:
        """A stock nova-scheduler on topic `scheduler`, beside all others."""
        started = self._fork_stock("main")
        self._wait_stock(started)
        return started

    @property
    def placement_process(self) -> Fork:
        """Of berth's placement, and of the front that is beside it."""
        return self._berth

    def start_front(self, *, holds: bool = False, states_max_age_s: float = 0.0) -> Fork:
        """A front on topic `scheduler`, beside all others. holds: it claims, and does not answer; see `held`."""
        file = Path(tempfile.mkdtemp(dir=self.folder)) / "front.json"
        self._tell(file, states_max_age_s)
        started = self._of_berth.start(
            self._log, settings=self._bus(), api="", front=str(file), holds=str(self._held(holds))
        )
        self._note(started)
        self._wait_front(started, file)
        return started

    def held(self) -> None:
        """Until a front that holds its answers has claimed for one."""
        for _ in self._until(self._berth, "a claim"):
            if self._held(True).exists():
                return

    def restart_broker(self) -> None:
        """Returns once it has started again."""
        wanted = self.folder.parent / RESTART
        wanted.touch()
        for _ in self._until(self._berth, "the broker"):
            if not wanted.exists():
                return

    def _held(self, holds: bool) -> Path | str:
        return self.folder / "held" if holds else ""

    def _bus(self) -> dict[str, Any]:
        return {"bus": {"url": self.urls["bus"]}} if "bus" in self.urls else {}

    def _tell(self, file: Path, states_max_age_s: float = 0.0) -> None:
        """Give a front its settings."""
        assert self.compute is not None
        settings = json.loads(json.dumps(self._cloud["front"]))
        settings["nova"] |= {
            "transport_url": self.urls["main"],
            "api": {
                "url": self.compute.url,
                "token": "not-looked-at",
                **self._cells(),
                "states_max_age_s": states_max_age_s,
            },
        }
        if "stock" in self.urls:
            settings["nova"]["fallback_url"] = self.urls["stock"]
        new = file.with_suffix(".new")
        new.write_text(json.dumps({"settings": settings, "weights": self._cloud["weights"] or {}}))
        new.rename(file)

    def _cells(self) -> dict[str, Any]:
        """Of one cell with hosts its uuid is enough; beside it there is cell0."""
        if len(self._cloud["cells"]) <= 2:
            return {"cells": {self._cell: ["*"]}}
        return {"cells_database": self._cloud["api_database"]}

    def _fork_stock(self, vhost: str) -> Fork:
        told = {**self._cloud, "placement": self.placement, "amqp": self.urls[vhost]}
        (self.folder / "cloud.json").write_text(json.dumps(told))
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        started = self._of_nova.start(self._log, cloud=str(self.folder / "cloud.json"), ready=str(ready))
        self._note(started)
        return started

    def _wait_stock(self, started: Fork) -> None:
        for _ in self._until(started, "nova-scheduler"):
            if (self.folder / "ready").exists():
                return

    def _wait_front(self, process: Fork, file: Path) -> None:
        served, told = file.with_name("served"), file.read_text()
        for _ in self._until(process, "the front"):
            if served.exists() and served.read_text() == told:
                return

    def _note(self, started: Fork) -> None:
        """For the end: the process of the test is killed."""
        with (self.folder / "forks").open("a") as file:
            file.write(f"{started.number}\n")

    def keep_up(self, cloud: Callable[[], dict[str, Any]]) -> None:
        """Before a call: restart schedulers whose settings the test has changed since, as its operator would; wait for
        a front, which serves once it has read Nova's API, and that comes last in a test.
        """
        if "bus" in self.urls or not self._cloud:
            return
        if cloud() != self._cloud:
            self.stop_scheduler()
            self.start_scheduler(cloud)
        if self.mode == "front":
            if self._scheduler is not None:
                self._wait_stock(self._scheduler)
            self._wait_front(self._berth, self._front)

    def stop_scheduler(self) -> None:
        """No stock scheduler serves; a front goes on until it is told other settings."""
        if self._scheduler is not None:
            self._scheduler.end()
        self._scheduler = None

    def stop(self) -> None:
        """End everything, at once: nothing of it is used again. The test's process, which had started some, is gone."""
        noted = self.folder / "forks"
        for number in noted.read_text().split() if noted.exists() else ():
            Fork(int(number)).end()
        self._berth.end()

    def _until(self, process: Fork, name: str) -> Iterator[None]:
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until and process.runs:
            yield
            time.sleep(POLL_S)
        raise NotStarted(f"{name} did not start: {self._log.read_text()[-2000:]}")


class World:
    """The servers of the present test, and those of the next one, which start meanwhile: a start takes seconds.

    berth: its Python. vhosts: of each test.
    """

    def __init__(self, mode: str, berth: str, vhosts: list[Vhosts], cell: str, folder: Path) -> None:
        self._mode = mode
        self._vhosts = iter(vhosts)
        self._cell = cell
        self._folder = folder
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        log = folder / f"forks-{os.getpid()}.log"
        of_berth = clean | {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "OPENBLAS_NUM_THREADS": "1"}
        self._forks = (
            Forks(berth, HERE / "berth_server.py", log, of_berth),
            Forks(sys.executable, HERE / "stock_scheduler.py", log, clean),
        )
        self._ahead: Servers | None = None
        self._now: Servers | None = None

    @property
    def servers(self) -> Servers:
        """Those of the present test."""
        assert self._now is not None, "more tests than vhosts"
        return self._now

    def next(self) -> None:
        """Servers for another test; what the last one has used is gone."""
        self._end()
        self._now = self._ahead or self._start()
        self._ahead = self._start()

    def close(self) -> None:
        """End everything."""
        self._end()
        if self._ahead is not None:
            self._ahead.stop()
        for one in self._forks:
            one.close()

    def _end(self) -> None:
        if self._now is not None:
            self._now.stop()
        self._now = None

    def _start(self) -> Servers | None:
        vhosts = next(self._vhosts, None)
        return None if vhosts is None else Servers(self._mode, self._forks, vhosts, self._cell, self._folder)


def free_port() -> int:
    """A port that nobody has just now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
