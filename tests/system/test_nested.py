"""Hosts that are trees, booted full: each example of docs/use/nested-hosts.md, and an upgrade in place under load."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec import Struct

from tests.system.nested import Example, example

pytestmark = [
    pytest.mark.system,
    pytest.mark.postgres,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

Held = tuple[str, str, int]  # (provider, class, amount)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Example]:
    path: Path = tmp_path_factory.mktemp("nested")
    async with example(path) as made:
        yield made


class Fill(Struct, frozen=True):
    """So many of a flavor fit, all together holding this; the next one's failure holds these words."""

    flavor: str
    fit: int
    held: dict[Held, int]
    words: str


def small(count: int, vcpus: int = 1, memory_mb: int = 512) -> dict[Held, int]:
    return {("host", "VCPU", vcpus): count, ("host", "MEMORY_MB", memory_mb): count}


FPGA = {
    ("host-numa0", "VCPU", 2): 2,
    ("host-numa0", "MEMORY_MB", 1024): 2,
    ("host-fpga0", "FPGA", 1): 2,
    ("host-numa1", "VCPU", 2): 1,
    ("host-numa1", "MEMORY_MB", 1024): 1,
    ("host-fpga1", "FPGA", 1): 1,
}
APART = "have room for each of groups CPU, DEV, but not for all of them together"
PORT: dict[Held, int] = {("host-br-public", f"NET_BW_{way}_KILOBIT_PER_SEC", 400): 2 for way in ("EGR", "IGR")}


@pytest.mark.parametrize(
    "fills",
    [
        pytest.param(
            [
                Fill(
                    "nic.whole", 1, {**small(1, 2, 1024), ("host-nic0", "CUSTOM_NIC", 1): 1}, "enough free for group 1"
                ),
                Fill("nic.vf", 8, {**small(8), ("host-nic1", "SRIOV_NET_VF", 1): 8}, "enough free for group 1"),
            ],
            id="two NICs, one whole, one carved",
        ),
        pytest.param(
            [
                Fill("vgpu.large", 2, {**small(2), ("host-gpu-b", "VGPU", 2): 2}, "enough free for group GPU"),
                Fill("vgpu.three", 1, {**small(1), ("host-gpu-a", "VGPU", 3): 1}, "enough free for group GPU"),
            ],
            id="VGPU",
        ),
        pytest.param(
            [Fill("numa.fpga", 3, FPGA, APART)],
            id="NUMA affinity",
        ),
        pytest.param(
            [Fill("stored", 2, {**small(2), ("pool of rack 1", "DISK_GB", 40): 2}, "DISK_GB")], id="shared storage"
        ),
        pytest.param(
            [Fill("routed", 3, {**small(3), ("segment 1", "IPV4_ADDRESS", 1): 3}, "enough free for group IP")],
            id="routed network",
        ),
        pytest.param(
            [Fill("port.400", 2, {**small(2), **PORT}, "enough free for group PORT")], id="bandwidth of a port"
        ),
    ],
)
async def test_a_host_takes_what_it_has_and_names_what_is_missing(system: Example, fills: Sequence[Fill]) -> None:
    running = []
    for fill in fills:
        watches = await system.boot(fill.flavor, fill.fit)
        assert [(watch.state, watch.last and watch.last.reason) for watch in watches] == [("active", "")] * fill.fit
        assert await system.where(watches) == Counter(fill.held)
        (refused,) = await system.boot(fill.flavor)
        assert refused.state == "failed"
        assert refused.last is not None
        assert fill.words in refused.last.reason, refused.last.reason
        running += watches
    await system.delete(running)
    assert await system.where(running) == Counter()
    (again,) = await system.boot(fills[-1].flavor)
    assert again.state == "active"
    await system.delete([again])


async def test_a_flat_host_turns_nested_while_boots_go_on(system: Example) -> None:
    flat = await system.boot("upgraded", 4)
    before: dict[Held, int] = {**small(4), ("host", "PGPU", 1): 4}
    assert await system.where(flat) == Counter(before)

    under_way = await system.client.boot(system.requests("upgraded", 6))
    await system.old_service(nested=True)
    meanwhile = await system.client.boot(system.requests("upgraded", 6))
    await system.ended()
    everything = [*flat, *under_way, *meanwhile]
    assert [watch.state for watch in everything] == ["active"] * 16, [t.last and t.last.reason for t in everything]

    held = await system.where(everything)
    assert Counter({key[:2]: count * key[2] for key, count in held.items() if key[1] == "PGPU"}) == {
        ("host-card0", "PGPU"): 8,
        ("host-card1", "PGPU"): 8,
    }
    assert sum(count for (_, name, _), count in held.items() if name == "VCPU") == 16
    assert {name for name, _, _ in held} == {"host-numa0", "host-numa1", "host-card0", "host-card1"}

    (refused,) = await system.boot("upgraded")
    assert refused.last is not None
    assert "PGPU" in refused.last.reason
    await system.delete(everything)
    assert await system.where(everything) == Counter()
    assert not [row for row in (await system.looked_at()).inventories if row.used]
