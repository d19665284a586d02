"""The servers of one of Nova's functional tests: a vhost, berth, and who answers topic `scheduler`.

Run by Nova's own interpreter, not by berth's. Each test has its own, so nothing is to be reset between two.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import amqp

START_TIMEOUT_S = 40.0
STOP_TIMEOUT_S = 30.0
POLL_S = 0.05
HERE = Path(__file__).parent

PLACEMENT_CONF = "[api]\nauth_strategy = noauth2\n[oslo_policy]\nenforce_new_defaults = False\n"
# Who calls Nova's API: its own test fixtures take user, project and roles from these headers, in Keystone's place.
ADMINISTRATOR = {
    "HTTP_X_AUTH_USER": "admin",
    "HTTP_X_AUTH_PROJECT_ID": "6f70656e737461636b20342065766572",
    "HTTP_X_ROLES": "reader,member,admin",
}

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


# Nova's own default, and those that some of the tests enable.
FILTERS = (
    "ComputeFilter",
    "ComputeCapabilitiesFilter",
    "ImagePropertiesFilter",
    "ServerGroupAntiAffinityFilter",
    "ServerGroupAffinityFilter",
    "SameHostFilter",
    "DifferentHostFilter",
    "NUMATopologyFilter",
    "PciPassthroughFilter",
)


class ComputeApi:
    """Nova's API on a real port, for a process that is not the test's; 503 until the test has made its API."""

    def __init__(self) -> None:
        self.app: App | None = None
        self._server = make_server("127.0.0.1", 0, self._call, Threading, Quiet)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v2.1"
        threading.Thread(target=self._server.serve_forever, name="compute-api", daemon=True).start()

    def _call(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if self.app is None:
            start_response("503 Service Unavailable", [("Content-Length", "0")])
            return [b""]
        return self.app(environ | ADMINISTRATOR, start_response)

    def close(self) -> None:
        """Give the port back."""
        self.app = None
        self._server.shutdown()
        self._server.server_close()


class Servers:
    """The processes of one test.

    url: of the vhost. cell: the uuid of the one that has the hosts. mode: `front` (berth answers topic `scheduler`) or
    `apart` (a stock nova-scheduler, in a process of its own, does).
    """

    def __init__(self, mode: str, berth: str, url: str, cell: str, folder: Path) -> None:
        self.mode = mode
        self.amqp = url
        self._cell = cell
        self.folder = Path(tempfile.mkdtemp(prefix="world-", dir=folder))
        self.compute = ComputeApi()
        self._scheduler: subprocess.Popen[bytes] | None = None
        self._cloud: dict[str, Any] = {}  # what it was told
        self._served = False
        address = f"127.0.0.1:{free_port()}"
        self.placement = f"http://{address}"
        (self.folder / "placement.conf").write_text(PLACEMENT_CONF)
        words = ["nova", "serve"] if mode == "front" else ["placement", "serve"]
        self._log = (self.folder / "log").open("wb")
        self._berth = self._run([berth, *words, "--memory", "--api", address], {"PYTHONPATH": "", **self._settings()})

    def _settings(self) -> dict[str, str]:
        settings = {"PLACEMENT__REST__CONF_DIR": str(self.folder), "TELEMETRY__LOG_LEVEL": "warning"}
        if self.mode == "front":
            settings |= {
                "NOVA__TRANSPORT_URL": self.amqp,
                "NOVA__API__URL": self.compute.url,
                "NOVA__API__TOKEN": "not-looked-at",
                "NOVA__API__CELLS": json.dumps({self._cell: ["*"]}),
                "NOVA__API__POLL_INTERVAL_S": "0.5",
                "NOVA__ENABLED_FILTERS": json.dumps(FILTERS),
            }
        return {f"BERTH_{name}": value for name, value in settings.items()}

    def _run(self, command: list[str], settings: dict[str, str]) -> subprocess.Popen[bytes]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("BERTH_",))}
        return subprocess.Popen(
            command, env=env | settings, stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT
        )

    def wait_placement(self) -> None:
        """Until placement answers. Raises NotStarted."""
        for _ in self._until(self._berth, "berth"):
            try:
                with urllib.request.urlopen(f"{self.placement}/", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                pass

    def start_scheduler(self, cloud: Callable[[], dict[str, Any]]) -> None:
        """Until topic `scheduler` is served. cloud: what a nova-scheduler outside the test's process has to know."""
        if self.mode == "front":
            return
        self._cloud = cloud()
        told = {**self._cloud, "placement": self.placement, "amqp": self.amqp}
        (self.folder / "cloud.json").write_text(json.dumps(told))
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        command = [sys.executable, str(HERE / "stock_scheduler.py"), str(self.folder / "cloud.json"), str(ready)]
        self._scheduler = self._run(command, {})
        for _ in self._until(self._scheduler, "nova-scheduler"):
            if ready.exists():
                return

    def keep_up(self, cloud: Callable[[], dict[str, Any]]) -> None:
        """Before a call: restart a scheduler whose settings the test has changed since, as its operator would; wait for
        a front, which serves once it has read Nova's API, and that comes last in a test.
        """
        if self.mode == "front" and not self._served:
            self._wait_served()
        if self._scheduler is not None and cloud() != self._cloud:
            self.stop_scheduler()
            self.start_scheduler(cloud)

    def _wait_served(self) -> None:
        address = urllib.parse.urlsplit(self.amqp)
        with amqp.Connection(
            f"{address.hostname}:{address.port}",
            userid=urllib.parse.unquote(address.username or ""),
            password=urllib.parse.unquote(address.password or ""),
            virtual_host=urllib.parse.unquote(address.path[1:]),
        ) as connection:
            for _ in self._until(self._berth, "the front"):
                try:
                    _, _, consumers = connection.channel().queue_declare("scheduler", passive=True)
                except amqp.NotFound:
                    continue
                if consumers:
                    self._served = True
                    return

    def stop_scheduler(self) -> None:
        """Nobody serves topic `scheduler`."""
        if self._scheduler is not None:
            _end(self._scheduler)
        self._scheduler = None

    def stop(self) -> None:
        """End everything."""
        self.stop_scheduler()
        _end(self._berth)
        self._log.close()
        self.compute.close()

    def _until(self, process: subprocess.Popen[bytes], name: str) -> Iterator[None]:
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until and process.poll() is None:
            yield
            time.sleep(POLL_S)
        raise NotStarted(f"{name} did not start: {(self.folder / 'log').read_text()[-2000:]}")


class World:
    """The servers of the present test, and those of the next one, which start meanwhile: a start takes seconds."""

    def __init__(self, mode: str, berth: str, amqp_urls: list[str], cell: str, folder: Path) -> None:
        self._mode = mode
        self._berth = berth
        self._urls = iter(amqp_urls)
        self._cell = cell
        self._folder = folder
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

    def _end(self) -> None:
        if self._now is not None:
            self._now.stop()
        self._now = None

    def _start(self) -> Servers | None:
        url = next(self._urls, None)
        return None if url is None else Servers(self._mode, self._berth, url, self._cell, self._folder)


def free_port() -> int:
    """A port that nobody has just now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()
