"""The two servers: the real Placement inside this process, and a berth of its own."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from calls import Call, content_of, resolved
from oslo_config import cfg
from placement import conf as placement_conf
from placement import deploy

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 60.0
TOKEN = "admin"
ROLES = "admin,service"  # /reshaper is for the role service alone


# The real Placement keeps the consumer that a refused or an empty write has created, with a generation that no request
# shows, so that no later request can name it. berth does not; both are to start alike again.
DELETE_EMPTY_CONSUMERS = "DELETE FROM consumers WHERE uuid NOT IN (SELECT consumer_id FROM allocations)"


class Server:
    """A Placement API, real or ours. database: the real one's SQLite file."""

    def __init__(self, client: httpx.Client, database: Path | None = None) -> None:
        self._client = client
        self._database = database

    def delete_empty_consumers(self) -> None:
        """Repair what the real Placement leaves behind."""
        assert self._database is not None
        with contextlib.closing(sqlite3.connect(self._database)) as connection, connection:
            connection.execute(DELETE_EMPTY_CONSUMERS)

    def send(self, call: Call, body: Any = None) -> httpx.Response:
        """The answer. body: the call's with its marks resolved."""
        headers = {
            "x-auth-token": TOKEN,
            "x-roles": ROLES,
            "openstack-api-version": f"placement {call.version}".strip(),
            **call.headers,
        }
        content = content_of(body)
        if content is not None:
            headers.setdefault("content-type", "application/json")
        headers = {name: value for name, value in headers.items() if value}
        return self._client.request(call.method, call.path, content=content, headers=headers)

    def get(self, path: str) -> Any:
        """Data of the newest version. Raises RuntimeError."""
        answer = self.send(Call("GET", path))
        if not answer.is_success:
            raise RuntimeError(f"GET {path}: {answer.status_code} {answer.text[:300]}")
        return answer.json()

    def resolve(self, body: Any) -> Any:
        """A body's marks as this server's numbers."""
        return resolved(body, self._provider_generation, self._consumer_generation)

    def _provider_generation(self, uuid: str) -> int:
        answer = self.send(Call("GET", f"/resource_providers/{uuid}"))
        return int(answer.json()["generation"]) if answer.is_success else 0

    def _consumer_generation(self, uuid: str) -> int | None:
        answer = self.send(Call("GET", f"/allocations/{uuid}"))
        return answer.json().get("consumer_generation") if answer.is_success else None

    def state(self) -> dict[str, Any]:
        """Everything that the API shows, for comparison."""
        providers: dict[str, Any] = {}
        consumers: dict[str, Any] = {}
        for provider in self.get("/resource_providers")["resource_providers"]:
            path = f"/resource_providers/{provider['uuid']}"
            shown = {key: provider[key] for key in provider if key != "links"}
            for kind in ("inventories", "traits", "aggregates", "usages"):
                value = self.get(f"{path}/{kind}")[kind]
                shown[kind] = sorted(value) if isinstance(value, list) else value
            for consumer in self.get(f"{path}/allocations")["allocations"]:
                consumers[consumer] = self.get(f"/allocations/{consumer}")
            providers[provider["uuid"]] = shown
        return {"providers": providers, "consumers": consumers}

    def wipe(self) -> None:
        """Remove everything."""
        providers = self.get("/resource_providers")["resource_providers"]
        for provider in providers:
            for consumer in self.get(f"/resource_providers/{provider['uuid']}/allocations")["allocations"]:
                self.send(Call("DELETE", f"/allocations/{consumer}"))
        left = {provider["uuid"] for provider in providers}
        while left:  # ends: leaves first, and every tree has some
            gone = {uuid for uuid in left if self.send(Call("DELETE", f"/resource_providers/{uuid}")).is_success}
            if not gone:
                raise RuntimeError(f"cannot remove {left}")
            left -= gone
        for name in self.get("/traits?name=startswith:CUSTOM_")["traits"]:
            self.send(Call("DELETE", f"/traits/{name}"))
        for row in self.get("/resource_classes")["resource_classes"]:
            if row["name"].startswith("CUSTOM_"):
                self.send(Call("DELETE", f"/resource_classes/{row['name']}"))


@contextlib.contextmanager
def real_application() -> Iterator[tuple[Any, Path]]:
    """The installed openstack-placement as a WSGI application over SQLite, and the file of its database."""
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="placement-") as folder:
        config = cfg.ConfigOpts()
        placement_conf.register_opts(config)
        config.set_override("auth_strategy", "noauth2", group="api")
        config.set_override("connection", f"sqlite:///{folder}/book.sqlite", group="placement_database")
        config.set_override("sqlite_synchronous", False, group="placement_database")
        config.set_override("sync_on_startup", True, group="placement_database")
        config([], default_config_files=[])
        application = deploy.loadapp(config)
        yield application, Path(folder, "book.sqlite")


@contextlib.contextmanager
def real_placement() -> Iterator[Server]:
    """The installed openstack-placement, called directly."""
    with real_application() as (application, database):
        transport = httpx.WSGITransport(app=application, raise_app_exceptions=False)
        with httpx.Client(transport=transport, base_url="http://127.0.0.1") as client:
            yield Server(client, database)


@contextlib.contextmanager
def berth(command: str, **database: str) -> Iterator[Server]:
    """A berth with an empty placement of its own, or with the one that DATABASE_URL names."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("OS_")}
    env["BERTH_TELEMETRY__LOG_LEVEL"] = "warning"
    env |= {f"BERTH_{name.replace('_', '__', 1)}": value for name, value in database.items()}
    scratch = [] if database else ["--scratch"]
    process = subprocess.Popen([command, "placement", "serve", *scratch, "--api", address], env=env, stdout=sys.stderr)
    try:
        with httpx.Client(base_url=f"http://{address}", timeout=ANSWER_TIMEOUT_S) as client:
            _wait(client, process)
            yield Server(client)
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def _wait(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if client.get("/").status_code == 200:
                return
        time.sleep(0.1)
    sys.exit("berth did not start")
