"""Boots a second and latency where rules bind: server groups, quotas, gangs, flavors of several numbered groups.

    python -m lab.benchmarks.rules [--boots 1000] [--hosts 5000] [--cells 4] [--json FILE]

Real servers and a process for each worker, as in scripts/street; each rule in turn on the same system, all boots
of it at once. Compare within one run: `plain` is the same load without a rule. Every boot must become active, every
member of an anti-affinity group on a host of its own; the invariants are judged at the end.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from berth.client import BuildClient
from berth.trial.servers import SystemPlan, real_servers, running_processes
from bus.clock import new_uuid
from bus.contracts.build import BuildRequest
from bus.contracts.groups import GroupPolicy, ServerGroup
from compute_sim.config import ComputeConfig
from lab.benchmarks.command import measured, parser_of, positive, write
from lab.benchmarks.street_systems import BIG, all_hosts_known, connected, invariants_hold, progress

TIMEOUT_S = 240.0
TEN = 10
FIVE = 5
LIMITED = "limited"  # the project that has a quota
NUMBERED = "numbered"  # the flavor of three numbered groups, one of them on a child provider (a GPU)
NUMBERED_SPECS = {
    **{f"resources:{name}": "0" for name in ("VCPU", "MEMORY_MB", "DISK_GB")},
    "resources1:VCPU": "1",
    "resources2:MEMORY_MB": "512",
    "resources3:VGPU": "1",
    "group_policy": "none",
}


class RuleResult(Struct, frozen=True, kw_only=True):
    """One rule's load. p50_ms, p99_ms: from the publish to the terminal event."""

    rule: str
    boots: int
    boots_per_s: float
    p50_ms: float
    p99_ms: float


def request(rng: random.Random, *, project: str = "bench", flavor: str = "m1.tiny", group: str = "") -> BuildRequest:
    """One boot. group: the uuid of its anti-affinity group."""
    apart = ServerGroup(uuid=group, policy=GroupPolicy.ANTI_AFFINITY) if group else None
    uuid = new_uuid(rng)
    return BuildRequest(
        instance_uuid=uuid, flavor=flavor, project_id=project, user_id="bench", name=uuid, server_group=apart
    )


def in_groups(rng: random.Random, boots: int, size: int) -> list[BuildRequest]:
    """Boots in anti-affinity groups of so many."""
    groups = [new_uuid(rng) for _ in range(math.ceil(boots / size))]
    return [request(rng, group=groups[number // size]) for number in range(boots)]


RULES: dict[str, Callable[[random.Random, int], list[BuildRequest]]] = {
    "plain": lambda rng, boots: [request(rng) for _ in range(boots)],
    "quota": lambda rng, boots: [request(rng, project=LIMITED) for _ in range(boots)],
    "anti-affinity, groups of 10": lambda rng, boots: in_groups(rng, boots, TEN),
    "anti-affinity, one group": lambda rng, boots: in_groups(rng, boots, boots),
    "gangs of 5": lambda rng, boots: [replace(request(rng), count=FIVE) for _ in range(math.ceil(boots / FIVE))],
    "three numbered groups": lambda rng, boots: [request(rng, flavor=NUMBERED) for _ in range(boots)],
}


async def fire(client: BuildClient, rule: str, requests: list[BuildRequest]) -> RuleResult:
    """All at once. Ends the program where one does not become active, or two of a group are on one host."""
    started = time.monotonic()
    tracks = await client.boot(requests, retry_for_s=TIMEOUT_S)
    if not await client.wait(TIMEOUT_S):
        raise SystemExit(f"{rule}: {client.unfinished} boots have not ended")
    seconds = time.monotonic() - started
    failed = [track.last for track in tracks if track.state != "active"]
    if failed:
        raise SystemExit(f"{rule}: {len(failed)} of {len(tracks)} boots failed: {failed[0]}")
    by_uuid = {track.instance_uuid: track for track in tracks}
    pairs = [(one, by_uuid[one.instance_uuid]) for one in requests]
    hosts = [(one.server_group.uuid, track.last and track.last.host) for one, track in pairs if one.server_group]
    if len(hosts) != len(set(hosts)):
        raise SystemExit(f"{rule}: {len(hosts) - len(set(hosts))} members share the host of another")
    took = sorted(1000 * (track.latency_s or 0.0) for track in tracks)
    return RuleResult(
        rule=rule,
        boots=len(tracks),
        boots_per_s=round(len(tracks) / seconds, 1),
        p50_ms=round(took[len(took) // 2], 1),
        p99_ms=round(took[int(0.99 * len(took))], 1),
    )


async def measure(boots: int, hosts: int, cells: int, rules: Sequence[str]) -> tuple[list[RuleResult], bool]:
    """Each rule in turn on one system; and whether the invariants hold at the end."""
    names = tuple(f"cell{number}" for number in range(1, cells + 1))
    per_cell = math.ceil(hosts / cells)
    plan = SystemPlan(
        cells=names,
        schedulers=1,
        placements=1,
        compute=ComputeConfig(hosts=per_cell, gpu_share=1.0, sizes=(BIG,)),
    )
    settings = {
        "BERTH_SCHEDULER__FLAVORS": {NUMBERED: {"vcpus": 1, "memory_mb": 512, "extra_specs": NUMBERED_SPECS}},
        "BERTH_SCHEDULER__QUOTAS": {LIMITED: {"INSTANCES": 10 * boots, "VCPU": 10 * boots, "MEMORY_MB": 10**9}},
    }
    extra = {name: msgspec.json.encode(value).decode() for name, value in settings.items()}
    found: list[RuleResult] = []
    with real_servers(names, durable=True) as servers:
        async with running_processes(servers, plan, extra=extra) as (_, here), connected(here) as client:
            await all_hosts_known(client, here, per_cell * cells)
            await fire(client, "warming up", RULES["plain"](random.Random(0), min(boots, 200)))
            for rule in rules:
                progress(f"{rule}: {boots:,} boots at once")
                found.append(await fire(client, rule, RULES[rule](random.Random(rule), boots)))
                print(line(found[-1]), flush=True)
            return found, await invariants_hold(client, here)


def line(result: RuleResult) -> str:
    """One rule as a row of a table."""
    return f"| {result.rule} | {result.boots_per_s:,.0f} | {result.p50_ms:,.0f} | {result.p99_ms:,.0f} |"


def main() -> int:
    """Print, and write when asked."""
    parser = parser_of(__doc__)
    parser.add_argument("--boots", type=positive, default=1_000, help="of each rule (%(default)s)")
    parser.add_argument("--hosts", type=positive, default=5_000)
    parser.add_argument("--cells", type=positive, default=4)
    parser.add_argument("--rules", choices=sorted(RULES), nargs="+", default=list(RULES))
    options = parser.parse_args()
    print("| rule | boots/s | p50 ms | p99 ms |\n| --- | --- | --- | --- |", flush=True)
    found, sound = measured(measure(options.boots, options.hosts, options.cells, options.rules))
    print(f"\ninvariants {'hold' if sound else 'BROKEN'}")
    write(found, options.json)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
