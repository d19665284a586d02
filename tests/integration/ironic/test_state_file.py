"""The nodes of the simulated Ironic outlive its process."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import httpx
import pytest
import structlog

from berth.settings import Settings, UpSettings
from berth.site import Brokers, Site
from berth.trial.ironic_stand_in import Behaviour, NodePool, RequestError, Silent, state_file
from berth.trial.ironic_stand_in.state_file import load, save, settled
from berth.trial.up import simulated_ironic
from berth.trial.worker_processes import NO_TLS
from bus.clock import SystemClock

PATIENCE_S = 60.0
INSTANCE = "0b2d1c9e-6f7a-4d53-9a40-2f1a3b4c5d6e"
SLOW = Behaviour(deploy_s=3600.0, clean_s=3600.0, verify_s=3600.0)


def site() -> Site:
    clock = SystemClock()
    return Site(Settings(up=UpSettings(nodes=4)), brokers=Brokers(clock), clock=clock, seed=1)


async def test_nodes_are_as_they_were_left(tmp_path: Path) -> None:
    kept = tmp_path / "deep" / "ironic.json"
    async with simulated_ironic(site(), SLOW, kept=kept) as ironic:
        assert ironic is not None
        first, second, *_ = ironic.pool.nodes
        async with httpx.AsyncClient(base_url=ironic.url, verify=NO_TLS, timeout=PATIENCE_S) as client:
            taken = [{"op": "add", "path": "/instance_uuid", "value": INSTANCE}]
            (await client.patch(f"/v1/nodes/{first}", json=taken)).raise_for_status()
            (await client.put(f"/v1/nodes/{second}/maintenance", json={"reason": "r"})).raise_for_status()
            (await client.delete(f"/v1/nodes/{list(ironic.pool.nodes)[3]}")).raise_for_status()
        left = {uuid: dict(node) for uuid, node in ironic.pool.nodes.items()}
    async with simulated_ironic(site(), kept=kept) as ironic:
        assert ironic is not None
        assert ironic.pool.nodes == left
        assert (left[first]["instance_uuid"], left[second]["maintenance"], len(left)) == (INSTANCE, True, 3)


async def test_a_killed_process_leaves_its_nodes_behind(tmp_path: Path) -> None:
    kept = tmp_path / "ironic.json"
    async with simulated_ironic(site(), kept=kept) as ironic:
        assert ironic is not None
        node = next(iter(ironic.pool.nodes.values()))
        await ironic.pool.patch(node, {"instance_uuid": INSTANCE}, "req")

        await until_kept(kept, node["uuid"])


async def until_kept(path: Path, node: str) -> None:
    def found() -> bool:
        other = NodePool(Silent(), clock=SystemClock(), rng=random.Random(1))
        return load(other, path) and other.nodes[node]["instance_uuid"] == INSTANCE

    async with asyncio.timeout(PATIENCE_S):
        while not found():  # noqa: ASYNC110  (a file has no event)
            await asyncio.sleep(0.02)


async def test_what_is_being_written_when_it_stops_does_not_outlast_what_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, begun, newer = tmp_path / "ironic.json", threading.Event(), threading.Event()
    write = state_file._write

    def slow(path: Path, body: bytes) -> None:
        if begun.is_set():
            write(path, body)
            newer.set()
        else:
            begun.set()
            newer.wait(0.3)
            write(path, body)

    monkeypatch.setattr(state_file, "_write", slow)
    async with simulated_ironic(site(), kept=kept) as ironic:
        assert ironic is not None
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        node = next(iter(ironic.pool.nodes.values()))
        await ironic.pool.patch(node, {"instance_uuid": INSTANCE}, "req")
    await asyncio.get_running_loop().shutdown_default_executor()
    await until_kept(kept, node["uuid"])


async def test_a_disk_that_was_full_is_written_again(tmp_path: Path) -> None:
    kept = tmp_path / "ironic.json"
    blocked = kept.with_suffix(".new")
    blocked.mkdir()
    with structlog.testing.capture_logs() as logs:
        async with simulated_ironic(site(), kept=kept) as ironic:
            assert ironic is not None
            node = next(iter(ironic.pool.nodes.values()))
            await ironic.pool.patch(node, {"instance_uuid": INSTANCE}, "req")
            async with asyncio.timeout(PATIENCE_S):
                while not logs:  # noqa: ASYNC110  (a log has no event)
                    await asyncio.sleep(0.02)
            blocked.rmdir()
            await until_kept(kept, node["uuid"])
            blocked.mkdir()
    assert [line["event"] for line in logs] == ["ironic.nodes_not_saved"] * 2, "and stopping is none the worse for it"


@pytest.mark.parametrize(
    ("state", "then", "instance"),
    [
        ("available", "available", INSTANCE),
        ("active", "active", INSTANCE),
        ("deploying", "deploy failed", INSTANCE),
        ("deleting", "available", None),
        ("cleaning", "available", None),
        ("verifying", "enroll", INSTANCE),
    ],
)
def test_what_was_under_way_is_settled(state: str, then: str, instance: str | None) -> None:
    pool = NodePool(Silent(), clock=SystemClock(), rng=random.Random(1))
    node = pool.add(provision_state=state, instance_uuid=INSTANCE)
    node |= {"reservation": "somebody", "target_provision_state": "active"}
    rested = settled(node)
    assert (rested["provision_state"], rested["instance_uuid"], rested["reservation"]) == (then, instance, None)
    assert rested["target_provision_state"] == ("active" if then == state else None)


def test_a_file_that_is_no_map_is_refused(tmp_path: Path) -> None:
    pool = NodePool(Silent(), clock=SystemClock(), rng=random.Random(1))
    path = tmp_path / "ironic.json"
    assert not load(pool, path)
    pool.plan(1)
    save(pool, path)
    half = path.read_bytes().removesuffix(b"]") + b', {"uuid": "x"}]'  # nor is the half of it that could be one
    pool.nodes.clear()
    for body in (b"", b"{}", b'[{"uuid": "x"}]', half):
        path.write_bytes(body)
        assert not load(pool, path)
        assert pool.nodes == {}
    pool.plan(2)
    save(pool, path)
    other = NodePool(Silent(), clock=SystemClock(), rng=random.Random(2))
    assert load(other, path)
    assert other.nodes == pool.nodes
    with pytest.raises(RequestError):
        other.get("nobody")
