"""Facts and import against a real Nova API, which runs inside Nova's own functional fixtures.

`BERTH_NOVA_PYTHON` names the Python of a virtualenv that has Nova with its tests, and Placement; without it nothing
of this runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from berth.cli.objects.nova_import import config_of, tree_of
from berth.cli.objects.objects import read_file
from berth.nova_objects.cloud import read_cloud
from berth.nova_objects.to_objects import imported
from bus.clock import SystemClock
from bus.contracts.objects import ObjectChange, ObjectsChange
from nova_scheduler.cloud.cells import ConfiguredCells
from nova_scheduler.cloud.poller import NovaStatePoller
from nova_scheduler.cloud.rest import NovaRest
from nova_scheduler.cloud.state import NovaState
from scheduler_worker.hosts.host_table import HostTable
from scheduler_worker.objects.change_plan import plan
from scheduler_worker.records.object_records import ChangePlan
from tests.kit.keystone import keystone_stand_in
from tests.kit.waiting import wait_until

PYTHON = os.environ.get("BERTH_NOVA_PYTHON", "")
HOSTS = ("host1", "host2", "host3.example.org")
PROJECT = "6f70656e737461636b20342065766572"
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="BERTH_NOVA_PYTHON is not set"),
    pytest.mark.xdist_group("nova_api"),
]


class Cloud:
    """The administrator of a real Nova."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/v2.1"
        headers = {"X-Auth-Token": f"admin:{PROJECT}", "OpenStack-API-Version": "compute 2.104"}
        self._client = httpx.Client(headers=headers, timeout=60, trust_env=False)
        cells = self._client.get(f"{url}/control/cells").text.split()
        self._casts = f"{url}/control/casts"
        self.cells = dict(zip(cells[::2], cells[1::2], strict=True))

    def call(self, method: str, path: str, body: object = None) -> Any:
        answer = self._client.request(method, self.url + path, json=body)
        assert answer.is_success, (method, path, answer.status_code, answer.text)
        return answer.json() if answer.content else None

    def casts(self) -> Any:
        """The arguments of Nova's casts about all its aggregates and instances, as it serializes them."""
        return self._client.get(self._casts).json()

    def flavor(self, name: str, specs: dict[str, str] | None = None, **more: object) -> str:
        body = {"name": name, "vcpus": 1, "ram": 512, "disk": 10, **more}
        made = self.call("POST", "/flavors", {"flavor": body})["flavor"]["id"]
        if specs:
            self.call("POST", f"/flavors/{made}/os-extra_specs", {"extra_specs": specs})
        return str(made)

    def aggregate(self, name: str, hosts: tuple[str, ...] = (), zone: str | None = None, **metadata: str) -> int:
        made = self.call("POST", "/os-aggregates", {"aggregate": {"name": name, "availability_zone": zone}})
        number = int(made["aggregate"]["id"])
        for host in hosts:
            self.call("POST", f"/os-aggregates/{number}/action", {"add_host": {"host": host}})
        if metadata:
            self.call("POST", f"/os-aggregates/{number}/action", {"set_metadata": {"metadata": metadata}})
        return number

    def service(self, host: str, **state: object) -> None:
        rows = self.call("GET", "/os-services")["services"]
        (found,) = [one["id"] for one in rows if one["host"] == host and one["binary"] == "nova-compute"]
        self.call("PUT", f"/os-services/{found}", state)

    def boot(self, host: str) -> str:
        body = {
            "name": "s",
            "imageRef": "155d900f-4e14-4e4c-a73d-069cbf4541e6",
            "flavorRef": self.flavor(f"for-{host}"),
            "networks": "none",
            "availability_zone": f":{host}",
        }
        made = str(self.call("POST", "/servers", {"server": body})["server"]["id"])
        wait_until(lambda: self.call("GET", f"/servers/{made}")["server"]["status"] == "ACTIVE")
        return made


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    if given := os.environ.get("BERTH_NOVA_API"):  # one that runs already
        yield Cloud(given)
        return
    folder = tmp_path_factory.mktemp("nova")
    port, server = folder / "port", Path(__file__).with_name("api_server.py")
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            [PYTHON, str(server), str(port), *HOSTS],
            stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=folder,
            env={"PATH": os.defpath, "HOME": str(folder)},
        )  # fmt: skip
        try:
            wait_until(lambda: (port.exists() and port.read_text()) or running.poll() is not None, 120)
            assert running.poll() is None, (folder / "log").read_text()[-4000:]
            yield Cloud(f"http://127.0.0.1:{port.read_text()}")
        finally:
            assert running.stdin is not None
            running.stdin.close()
            try:
                running.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()


class Kept:
    """Berth's facts about that cloud."""

    def __init__(self, cloud: Cloud) -> None:
        self.table = HostTable()
        self.facts = NovaState(self.table)
        self.rest = NovaRest(
            config_of(cloud.url, {"OS_TOKEN": f"admin:{PROJECT}"}), clock=SystemClock(), setting="nova"
        )
        self.poller = NovaStatePoller(
            self.rest,
            self.facts,
            self.table,
            cells=ConfiguredCells(dict.fromkeys(cloud.cells.values(), ("*",))),
            config=config_of(cloud.url, {}),
            clock=SystemClock(),
        )

    def states(self) -> dict[str, tuple[bool, bool]]:
        """{host: (whether its service is up, whether it is enabled)}."""
        found = {}
        for index, uuid in enumerate(self.table.uuids):
            node = self.facts.node(uuid)
            assert node is not None and self.facts.nodes_named(node.host, node.nodename) == (uuid,)
            found[node.host] = (self.table.live_service_of(uuid) == node.host, bool(self.table.enabled[index]))
        return found


@asynccontextmanager
async def kept(cloud: Cloud) -> AsyncIterator[Kept]:
    made = Kept(cloud)
    try:
        await made.poller.ask([])
        yield made
    finally:
        await made.rest.close()


async def test_hosts_are_up_down_disabled_as_nova_has_them(cloud: Cloud) -> None:
    async with kept(cloud) as world:
        nodes = await world.rest.nodes()
        assert [service.host for _, service in nodes] == sorted(HOSTS)
        assert {node.hypervisor_type for node, _ in nodes} == {"fake"}
        assert {node.cpu_info["arch"] for node, _ in nodes} == {"x86_64"}
        roots = [node.uuid for node, _ in nodes]
        assert await world.poller.ask(roots) is True, "hosts that the book has and nothing has announced"
        assert world.states() == dict.fromkeys(HOSTS, (True, True))
        assert {world.facts.cell_of(root) for root in roots} == set(cloud.cells.values())
        assert await world.rest.node("00000000-0000-4000-8000-000000000001") is None
        try:
            cloud.service("host1", status="disabled", disabled_reason="fan")
            cloud.service("host2", forced_down=True)
            changed = await _asked(world)
            assert changed and world.states()["host1"] == (True, False) and world.states()["host2"] == (False, True)
        finally:
            cloud.service("host1", status="enabled")
            cloud.service("host2", forced_down=False)
        assert await _asked(world) and world.states() == dict.fromkeys(HOSTS, (True, True))


async def _asked(world: Kept) -> bool:
    world.poller._read_s = 0.0  # not a second later
    return await world.poller.ask()


async def test_pages_of_one_node(cloud: Cloud) -> None:
    config = config_of(cloud.url, {"OS_TOKEN": f"admin:{PROJECT}"})
    rest = NovaRest(type(config)(url=config.url, token=config.token, page_size=1), clock=SystemClock(), setting="nova")
    assert len(await rest.nodes()) == len(HOSTS)
    assert await rest.version() == (2, 104)
    await rest.close()


async def test_aggregates_zones_and_servers(cloud: Cloud) -> None:
    made = cloud.aggregate("rack-1", ("host1", "host3.example.org"), zone="east", ssd="true")
    server = cloud.boot("host2")
    async with kept(cloud) as world:
        await world.poller.ask([node.uuid for node, _ in await world.rest.nodes()])
        (rack,) = [one for one in world.facts.aggregates() if one.name == "rack-1"]
        assert rack.metadata == {"availability_zone": "east", "ssd": "true"}
        named = world.facts.membership().named[rack.uuid]
        assert named == {*world.facts.nodes_named("host1"), *world.facts.nodes_named("host3.example.org")}
        casts = cloud.casts()
        assert [one.name for one in world.facts.aggregates()] == sorted(
            one["nova_object.data"]["name"] for one in casts["aggregates"]["nova_object.data"]["objects"]
        )
        before = world.facts.version
        assert world.poller.apply_cast("update_aggregates", {"aggregates": casts["aggregates"]})
        assert world.facts.version == before, "as the API has them"
        given = {"host_name": "host2", "instance_info": casts["instance_info"]}
        assert world.poller.apply_cast("update_instance_info", given)
        assert await world.rest.task_of(server) == "" and await world.rest.task_of(str(uuid4())) is None
        for host in ("host1", "host3.example.org"):
            cloud.call("POST", f"/os-aggregates/{made}/action", {"remove_host": {"host": host}})
        cloud.call("DELETE", f"/os-aggregates/{made}")
        assert await _asked(world) and rack.uuid not in {one.uuid for one in world.facts.aggregates()}


async def test_a_login_at_keystone_and_a_wrong_one(cloud: Cloud) -> None:
    async with keystone_stand_in() as (keystone, address):
        login = {"OS_AUTH_URL": address, "OS_USERNAME": "berth", "OS_PASSWORD": "right"}
        rest = NovaRest(config_of(cloud.url, login), clock=SystemClock(), setting="nova")
        assert {one.host for one in await rest.services()} == set(HOSTS) and keystone.signed_in == 1
        await rest.close()
    wrong = NovaRest(config_of(cloud.url, {"OS_TOKEN": "none"}), clock=SystemClock(), setting="nova")
    with pytest.raises(Exception, match="401"):
        await wrong.services()
    await wrong.close()


async def test_import(cloud: Cloud, tmp_path: Path) -> None:
    cloud.flavor("im.plain", {"trait:HW_CPU_X86_AVX": "required", "hide_hypervisor_id": "true"})
    cloud.flavor("im.disks", disk=10, **{"OS-FLV-EXT-DATA:ephemeral": 5, "swap": 1500})
    cloud.flavor("im.pinned", {"hw:cpu_policy": "dedicated"}, vcpus=3)
    groups = {"resources1:CUSTOM_A": "1", "resources2:CUSTOM_A": "1"}
    cloud.flavor("im.groups", groups)
    cloud.flavor("im.numa", {"hw:numa_nodes": "2"})
    private = cloud.flavor("im.ours", **{"os-flavor-access:is_public": False})
    access = {"addTenantAccess": {"tenant": PROJECT}}
    cloud.call("POST", f"/flavors/{private}/action", access)
    cloud.flavor("im.nobody", **{"os-flavor-access:is_public": False})
    number = cloud.aggregate("im-rack", ("host1",), zone="west")
    policy = {"name": "web", "policy": "anti-affinity", "rules": {"max_server_per_host": 2}}
    first, second = (cloud.call("POST", "/os-server-groups", {"server_group": policy})["server_group"] for _ in "12")
    alone = {"name": "db", "policy": "soft-affinity"}
    cloud.call("POST", "/os-server-groups", {"server_group": alone})
    cloud.call("PUT", f"/os-quota-sets/{PROJECT}", {"quota_set": {"cores": 77, "ram": -1}})
    rest = NovaRest(config_of(cloud.url, {"OS_TOKEN": f"admin:{PROJECT}"}), clock=SystemClock(), setting="nova")
    found = imported(await read_cloud(rest), with_hosts=True)
    await rest.close()
    tree = tree_of(found)
    changes = tuple(
        ObjectChange(kind=kind, name=name, body=body)
        for kind, bodies in found.objects.items()
        for name, body in bodies.items()
    )
    assert isinstance(plan(ObjectsChange(changes=changes, actor="test"), {}), ChangePlan), "a scheduler takes them"
    assert tree["flavors"]["im.plain"] == {
        "vcpus": 1, "memory_mb": 512, "disk_gb": 10,
        "extra_specs": {"trait:HW_CPU_X86_AVX": "required", "hide_hypervisor_id": "true"},
    }  # fmt: skip
    assert tree["flavors"]["im.disks"]["disk_gb"] == 10 + 5 + 2
    assert tree["flavors"]["im.pinned"]["extra_specs"] == {
        "hw:cpu_policy": "dedicated", "resources:PCPU": "3", "resources:VCPU": "0",
    }  # fmt: skip
    assert tree["flavors"]["im.groups"]["extra_specs"] == {**groups, "group_policy": "none"}
    assert tree["flavors"]["im.ours"]["projects"] == [PROJECT]
    assert {(one.name, one.code) for one in found.excluded} >= {
        ("im.numa", "import.spec"), ("im.nobody", "import.of_nobody"),
    }  # fmt: skip
    rack = tree["aggregates"]["im-rack"]
    assert rack["hosts"] == ["host1"] and rack["metadata"] == {"availability_zone": "west"}
    for one in (first, second):
        body = {"uuid": one["id"], "policy": "anti-affinity", "max_per_host": 2}
        assert tree["groups"][f"{PROJECT}/web-{one['id']}"] == body
    assert tree["groups"][f"{PROJECT}/db"]["policy"] == "soft-affinity"
    assert tree["quotas"]["default"] == {"INSTANCES": 10, "MEMORY_MB": 51200, "VCPU": 20}
    assert tree["quotas"][PROJECT] == {"INSTANCES": 10, "VCPU": 77}
    cloud.call("POST", f"/os-aggregates/{number}/action", {"remove_host": {"host": "host1"}})


def test_the_command_as_an_operator_runs_it(cloud: Cloud, tmp_path: Path) -> None:
    """Its file is what `berth apply` reads."""
    cloud.flavor("cmd.plain")
    cloud.flavor("cmd.numa", {"hw:numa_nodes": "2"})
    file = tmp_path / "nova.toml"
    environment = {**os.environ, "OS_TOKEN": f"admin:{PROJECT}"}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "berth", "nova", "import", cloud.url, *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)

    done = run("--to", str(file), "--with-hosts")
    assert done.returncode == 1 and "cmd.numa" in done.stderr and not done.stdout
    changes, _ = read_file(file)
    assert {one.name for one in changes} >= {"cmd.plain", "default"}
    file.unlink()
    assert run("--to", str(file), "--dry-run").returncode == 1 and not file.exists()
    report = json.loads(run("-o", "json").stdout)
    assert report["objects"]["flavors"]["cmd.plain"]["vcpus"] == 1 and report["taken"]["flavors"] >= 1
    assert "cmd.numa" in {one["name"] for one in report["excluded"]}
