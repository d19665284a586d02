"""An operator's work on Placement, done to a live berth with OpenStack's own clients; see scripts/nightly clients.

Run by the clients' own interpreter, not by berth's: it imports nothing of berth's. Two lives: one through the
`openstack` command with its plugin osc-placement, one through openstacksdk. Each step names what it expects back.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openstack
from openstack import exceptions
from openstackclient import shell

START_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 60.0
COMMAND_TIMEOUT_S = 120.0
TOKEN = "admin"
NEWEST = "1.39"

# Commands that print nothing, and so know no format.
SILENT = {("resource", "class", "create"), ("trait", "create")}


class Unexpected(Exception):
    """A client did not get what it should."""


def expect(what: str, found: Any, wanted: Any) -> None:
    """Raises Unexpected."""
    if found != wanted:
        raise Unexpected(f"{what}: {found!r} instead of {wanted!r}")


class OpenStackCommand:
    """The `openstack` command: its first call is a process, the others are its entry point called here.

    A process takes seconds to find and load its plugins; what it then does is the same.
    """

    def __init__(self, command: str, url: str) -> None:
        self._command = command
        self._url = url
        self.calls = 0

    def __call__(self, *words: str, version: str = NEWEST) -> Any:
        """The command's output as data, None when it has none. Raises Unexpected."""
        done = self._run(*words, version=version)
        if done.returncode:
            raise Unexpected(f"openstack {' '.join(words)}: exit status {done.returncode}: {done.stderr.strip()}")
        return json.loads(done.stdout) if done.stdout.strip() else None

    def refused(self, *words: str, because: str) -> None:
        """The command must fail and print why."""
        done = self._run(*words, version=NEWEST)
        if not done.returncode or because not in done.stderr:
            raise Unexpected(f"openstack {' '.join(words)}: {done.returncode}, {done.stderr.strip()!r}")

    def _run(self, *words: str, version: str) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        auth = ["--os-auth-type", "admin_token", "--os-endpoint", self._url, "--os-token", TOKEN]
        shown = [] if "delete" in words or words[:-1] in SILENT else ["-f", "json"]
        arguments = [*auth, "--os-placement-api-version", version, *words, *shown]
        if self.calls > 1:
            return self._here(arguments)
        return subprocess.run(
            [self._command, *arguments], capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )

    @staticmethod
    def _here(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = shell.OpenStackShell().run(arguments)
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def command_life(run: OpenStackCommand) -> None:
    """A host with a device is described, machines are put on it, and everything is taken away again."""
    trait, kind = "CUSTOM_BERTH_GOLD", "CUSTOM_BERTH_DEVICE"
    aggregate, consumer = str(uuid.uuid4()), str(uuid.uuid4())
    run("resource", "class", "create", kind)
    run("trait", "create", trait)
    host = run("resource", "provider", "create", "osc-host")
    device = run("resource", "provider", "create", "osc-device", "--parent-provider", host["uuid"])
    expect("the device's root", device["root_provider_uuid"], host["uuid"])
    inventories = ["--resource", "VCPU=8", "--resource", "VCPU:allocation_ratio=2.0", "--resource", "MEMORY_MB=4096"]
    run("resource", "provider", "inventory", "set", host["uuid"], *inventories)
    run("resource", "provider", "inventory", "set", device["uuid"], "--resource", f"{kind}=1")
    found = run("resource", "provider", "inventory", "show", host["uuid"], "VCPU")
    expect("the ratio", found["allocation_ratio"], 2.0)
    run("resource", "provider", "trait", "set", device["uuid"], "--trait", trait)
    aggregates = ["resource", "provider", "aggregate", "set", host["uuid"], "--aggregate", aggregate]
    run(*aggregates, "--generation", "1")
    listed = run("resource", "provider", "list", "--member-of", aggregate)
    expect("who is in the aggregate", [row["name"] for row in listed], ["osc-host"])
    groups = ["--group", "1", "--resource", f"{kind}=1", "--required", trait]
    candidates = run("allocation", "candidate", "list", "--resource", "VCPU=2", "--resource", "MEMORY_MB=512", *groups)
    both = {host["uuid"], device["uuid"]}
    expect("the candidate's providers", {row["resource provider"] for row in candidates}, both)
    held = [f"rp={host['uuid']},VCPU=2,MEMORY_MB=512", f"rp={device['uuid']},{kind}=1"]
    owner = ["--project-id", "p", "--user-id", "u", "--consumer-type", "INSTANCE"]
    wanted = [word for line in held for word in ("--allocation", line)]
    run("resource", "provider", "allocation", "set", consumer, *wanted, *owner)
    shown = run("resource", "provider", "allocation", "show", consumer)
    expect("what the consumer holds", {row["resource_provider"] for row in shown}, both)
    usage = run("resource", "provider", "usage", "show", host["uuid"])
    expect("what is used", {row["resource_class"]: row["usage"] for row in usage}, {"VCPU": 2, "MEMORY_MB": 512})
    run("resource", "usage", "show", "p", version="1.37")
    run.refused("resource", "provider", "delete", device["uuid"], because="HTTP 409")
    run("resource", "provider", "allocation", "delete", consumer)
    run("resource", "provider", "delete", device["uuid"])
    run("resource", "provider", "delete", host["uuid"])
    run("trait", "delete", trait)
    run("resource", "class", "delete", kind)
    expect("what is left", run("resource", "provider", "list"), [])


def sdk_life(url: str) -> int:
    """The same through openstacksdk: its own objects where it has them, plain requests for the rest."""
    auth = {"endpoint": url, "token": TOKEN}
    cloud = openstack.connection.Connection(auth_type="admin_token", auth=auth, placement_default_microversion=NEWEST)
    api = cloud.placement
    kind = api.create_resource_class(name="CUSTOM_BERTH_SDK")
    trait = api.create_trait(name="CUSTOM_BERTH_SDK")
    host = api.create_resource_provider(name="sdk-host")
    child = api.create_resource_provider(name="sdk-child", parent_provider_uuid=host.id)
    expect("the child's root", child.root_provider_id or child.to_dict().get("root_provider_uuid"), host.id)
    inventory = api.create_resource_provider_inventory(host, "VCPU", total=16)
    expect("the total", inventory.total, 16)
    inventory = api.update_resource_provider_inventory(inventory, host, total=32, resource_provider_generation=1)
    expect("the new total", inventory.total, 32)
    expect("the classes", [row.id or row.resource_class for row in api.resource_provider_inventories(host)], ["VCPU"])
    host = api.get_resource_provider(host.id)  # its generation has moved
    api.set_resource_provider_aggregates(host, str(uuid.uuid4()))
    found = api.find_resource_provider("sdk-host")
    expect("found by its name", found.id, host.id)
    fitting = api.get("/allocation_candidates?resources=VCPU:4&limit=5", microversion=NEWEST).json()
    expect("candidates", len(fitting["allocation_requests"]), 1)
    consumer = str(uuid.uuid4())
    body = {
        **fitting["allocation_requests"][0],
        "project_id": "p",
        "user_id": "u",
        "consumer_generation": None,
        "consumer_type": "INSTANCE",
    }
    expect("the claim", api.put(f"/allocations/{consumer}", json=body, microversion=NEWEST).status_code, 204)
    try:
        api.delete_resource_provider(host, ignore_missing=False)
    except exceptions.ConflictException as refused:
        expect("the refusal", refused.status_code, 409)
    else:
        raise Unexpected("a provider with children and allocations was deleted")
    expect("the release", api.delete(f"/allocations/{consumer}", microversion=NEWEST).status_code, 204)
    api.delete_resource_provider_inventory("VCPU", host)
    for made in (child, host):
        api.delete_resource_provider(made, ignore_missing=False)
    api.delete_trait(trait, ignore_missing=False)
    api.delete_resource_class(kind, ignore_missing=False)
    expect("what is left", list(api.resource_providers()), [])
    return 17


@contextlib.contextmanager
def berth(command: str) -> Iterator[str]:
    """The URL of a berth with an empty book of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {**os.environ, "BERTH_TELEMETRY__LOG_LEVEL": "warning"}
    process = subprocess.Popen(
        [command, "placement", "serve", "--scratch", "--api", address], env=env, stdout=sys.stderr
    )
    try:
        _wait(f"http://{address}/", process)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(STOP_TIMEOUT_S)


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    sys.exit("berth did not start")


def main() -> int:
    """0 when both lives went as they should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--berth", required=True, help="the berth command")
    parser.add_argument("--openstack", required=True, help="the openstack command")
    parser.add_argument("--json", type=Path, help="write what was done there")
    options = parser.parse_args()
    for name in [name for name in os.environ if name.startswith("OS_")]:
        del os.environ[name]  # no cloud of the user who runs this
    report: dict[str, Any] = {"passed": True}
    with berth(options.berth) as url:
        command = OpenStackCommand(options.openstack, url)
        lives: dict[str, Callable[[], int | None]] = {
            "openstack command": lambda: command_life(command),
            "openstacksdk": lambda: sdk_life(url),
        }
        for name, life in lives.items():
            began = time.monotonic()
            try:
                calls = life() or command.calls
                report[name] = {"steps": calls, "seconds": round(time.monotonic() - began, 1)}
            except (Unexpected, exceptions.SDKException) as wrong:
                report["passed"] = False
                report[name] = {"wrong": f"{type(wrong).__name__}: {wrong}"}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    sys.stdout.write(json.dumps(report) + "\n")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
