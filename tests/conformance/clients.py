"""A provider's life by the clients that operators use: the `openstack` command and openstacksdk, on a live berth.

Run by the clients' own interpreter; see scripts/conformance --clients. Ends with 0 when every step went as it should.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openstack

PROVIDER = "00000000-0000-4000-8000-00000000aaaa"
CHILD = "00000000-0000-4000-8000-00000000aaab"
AGGREGATE = "00000000-0000-4000-8000-00000000bbbb"
CONSUMER = "00000000-0000-4000-8000-00000000cccc"
START_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 60.0


@contextlib.contextmanager
def berth(command: str) -> Iterator[str]:
    """A berth with an empty book, for as long as the block runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    env = {**os.environ, "BERTH_TELEMETRY__LOG_LEVEL": "warning"}
    process = subprocess.Popen([command, "placement", "serve", "--scratch", "--api", address], env=env)
    try:
        until = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://{address}/", timeout=5)
                break
            assert process.poll() is None and time.monotonic() < until, "berth did not start"
            time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(15)


class Command:
    """The `openstack` command with osc-placement."""

    def __init__(self, url: str) -> None:
        self._start = [
            str(Path(sys.executable).parent / "openstack"),
            *("--os-auth-type", "admin_token", "--os-endpoint", url, "--os-token", "admin"),
            *("--os-placement-api-version", "1.39"),
        ]

    def __call__(self, text: str, *, answers: bool = True) -> Any:
        """What the command prints, as data."""
        line = [*self._start, *text.split(), *(("-f", "json") if answers else ())]
        done = subprocess.run(line, capture_output=True, text=True, timeout=STEP_TIMEOUT_S, check=False)
        assert done.returncode == 0, f"{text}: {done.stderr}"
        return json.loads(done.stdout) if answers else None


def by_command(url: str) -> None:
    """A life in commands."""
    run = Command(url)
    made = run(f"resource provider create --uuid {PROVIDER} host-1")
    assert (made["uuid"], made["generation"]) == (PROVIDER, 0), made
    run(f"resource provider create --uuid {CHILD} --parent-provider {PROVIDER} numa-1")
    stock = run(f"resource provider inventory set {PROVIDER} --resource VCPU=8 --resource VCPU:max_unit=4")
    assert (stock[0]["total"], stock[0]["max_unit"]) == (8, 4), stock
    run("trait create CUSTOM_FAST", answers=False)
    run(f"resource provider trait set {PROVIDER} --trait CUSTOM_FAST")
    run(f"resource provider aggregate set {PROVIDER} --aggregate {AGGREGATE} --generation 2")
    found = run(f"allocation candidate list --resource VCPU=2 --required CUSTOM_FAST --member-of {AGGREGATE}")
    assert [row["resource provider"] for row in found] == [PROVIDER], found
    owner = "--project-id p --user-id u --consumer-type INSTANCE"
    run(f"resource provider allocation set {CONSUMER} --allocation rp={PROVIDER},VCPU=2 {owner}")
    usage = {row["resource_class"]: row["usage"] for row in run(f"resource provider usage show {PROVIDER}")}
    assert usage == {"VCPU": 2}, usage
    [total] = run("resource usage show p")
    assert total["usage"] == {"VCPU": 2, "consumer_count": 1}, total
    run(f"resource provider allocation delete {CONSUMER}", answers=False)
    run(f"resource provider delete {CHILD}", answers=False)
    run(f"resource provider delete {PROVIDER}", answers=False)
    assert run("resource provider list") == []


def by_sdk(url: str) -> None:
    """A life in openstacksdk's words."""
    auth = {"endpoint": url, "token": "admin"}
    cloud = openstack.connect(auth_type="admin_token", auth=auth, placement_endpoint_override=url)
    placement = cloud.placement
    placement.default_microversion = "1.39"
    made = placement.create_resource_provider(name="host-2")
    assert [row.name for row in placement.resource_providers()] == ["host-2"]
    stock = placement.create_resource_provider_inventory(made, "DISK_GB", total=100)
    assert (stock.total, stock.reserved) == (100, 0), stock
    assert [row.resource_class for row in placement.resource_provider_inventories(made)] == ["DISK_GB"]
    assert placement.get_trait("HW_CPU_X86_AVX2").id == "HW_CPU_X86_AVX2"
    placement.create_resource_class(name="CUSTOM_GOLD")
    assert "CUSTOM_GOLD" in [row.name for row in placement.resource_classes()]
    placement.delete_resource_class("CUSTOM_GOLD")
    changed = placement.update_resource_provider(made, name="host-3")
    assert changed.name == "host-3", changed
    placement.delete_resource_provider(made)
    assert list(placement.resource_providers()) == []


def main() -> int:
    """Both lives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--berth", required=True, help="the berth command")
    options = parser.parse_args()
    with berth(options.berth) as url:
        for life in (by_sdk, by_command):
            life(url)
            sys.stdout.write(f"{life.__name__}: well\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
