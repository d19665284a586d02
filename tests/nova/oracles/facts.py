"""Filters and weighers of what the cells' databases tell, beside Nova's own: `python -m tests.nova.oracles.facts --nova
PYTHON [--pairs N] [--seed S]`.

Random rows of `compute_nodes`, aggregates, images and options of nova.conf through Nova's own class, as its scheduler
reads them, and through ours, as the front does: which hosts pass, and what they weigh. Exit status 1: one differs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct, convert
from msgspec.structs import replace

from berth.config.settings import Settings
from bus.clock import SystemClock
from bus.contracts.placement import ProviderState
from nova_scheduler.cloud.cell_database import parse_rows
from nova_scheduler.cloud.facts_poller import HostFactsPoller
from nova_scheduler.cloud.host_facts import CellRead, HostFacts
from nova_scheduler.cloud.state import ComputeNode, NovaAggregate, NovaService, NovaState, host_table
from nova_scheduler.nova_conf import translate
from placement_worker.replica.replica import Replica
from placement_worker.replica.request import Query
from scheduler_worker import plugins
from scheduler_worker.config import HOST_FACT_FILTERS
from scheduler_worker.selection.request_spec import RequestSpec
from scheduler_worker.selection.selector import Selector
from scheduler_worker.selection.selector_config import SelectorConfig
from scheduler_worker.selection.weighing import score
from tests.nova.oracles.process import Nova

NOVAS_SIDE = Path(__file__).with_name("nova_facts.py")
HOSTS = 8  # of one case
CELL = "00000000-0000-4000-8000-0000000000c1"
METRICS = ("cpu.frequency", "cpu.user.time", "cpu.percent", "cpu.user.percent", "cpu.idle.percent")
IMAGES = tuple(f"00000000-0000-4000-8000-0000000000f{at}" for at in range(3))
LEAST_SHARE = 0.2  # of the hosts that pass a filter, and of those that do not

Options = list[tuple[str, str, str]]  # group, option, text
Drawn = Callable[[random.Random], Options]


class Subject(Struct, frozen=True):
    """A class, and what is drawn for it."""

    module: str
    options: Drawn
    metadata: str = ""  # the key of an aggregate's metadata
    values: tuple[str, ...] = ()

    @property
    def weighs(self) -> bool:
        return ".weights." in self.module


def bound(option: str, *values: int) -> Drawn:
    return lambda rng: [] if rng.random() < 0.2 else [("filter_scheduler", option, str(rng.choice(values)))]


def multiplier(name: str, group: str = "filter_scheduler", option: str = "") -> Drawn:
    values = ("-1.0", "1.0", "2.5", "0.5", "-1000000.0")
    return lambda rng: [(group, option or f"{name}_weight_multiplier", rng.choice(values))]


def isolated(rng: random.Random) -> Options:
    images = ",".join(rng.sample(IMAGES, rng.randrange(3)))
    hosts = ",".join(rng.sample([f"h{at}" for at in range(HOSTS)], rng.randrange(HOSTS)))
    restricts = rng.choice(("true", "false"))
    return [
        ("filter_scheduler", "isolated_images", images),
        ("filter_scheduler", "isolated_hosts", hosts),
        ("filter_scheduler", "restrict_isolated_hosts_to_isolated_images", restricts),
    ]


def setting(rng: random.Random) -> Options:
    named = rng.sample(METRICS, rng.randrange(1, 4))
    if rng.random() < 0.2:
        named.append(named[0])
    text = ", ".join(f"{name}={rng.choice(('1.0', '-2', '0.25', '0'))}" for name in named)
    return [("metrics", "weight_setting", text), ("metrics", "required", "false")]


def weighed_metrics(rng: random.Random) -> Options:
    unavailable = ("metrics", "weight_of_unavailable", rng.choice(("-10000.0", "0", "7")))
    return [*setting(rng), *multiplier("", "metrics", "weight_multiplier")(rng), unavailable]


IO, COUNT = "max_io_ops_per_host", "max_instances_per_host"
BOUNDS, FACTORS = ("1", "3", " 5 ", "8", "40", "x", "2.5", "-1"), ("1", "-2.5", "0", "1e3", "x", "0.5")
FILTERS, WEIGHTS = "nova.scheduler.filters", "nova.scheduler.weights"
SUBJECTS = {
    "IoOpsFilter": Subject(f"{FILTERS}.io_ops_filter", bound(IO, 0, 2, 4, 8)),
    "AggregateIoOpsFilter": Subject(f"{FILTERS}.io_ops_filter", bound(IO, 1, 4, 8), IO, BOUNDS),
    "NumInstancesFilter": Subject(f"{FILTERS}.num_instances_filter", bound(COUNT, 1, 20, 40)),
    "AggregateNumInstancesFilter": Subject(f"{FILTERS}.num_instances_filter", bound(COUNT, 20, 30), COUNT, BOUNDS),
    "IsolatedHostsFilter": Subject(f"{FILTERS}.isolated_hosts_filter", isolated),
    "MetricsFilter": Subject(f"{FILTERS}.metrics_filter", setting),
    "IoOpsWeigher": Subject(f"{WEIGHTS}.io_ops", multiplier("io_ops"), "io_ops_weight_multiplier", FACTORS),
    "NumInstancesWeigher": Subject(
        f"{WEIGHTS}.num_instances", multiplier("num_instances"), "num_instances_weight_multiplier", FACTORS
    ),
    "HypervisorVersionWeigher": Subject(
        f"{WEIGHTS}.hypervisor_version",
        multiplier("hypervisor_version"),
        "hypervisor_version_weight_multiplier",
        FACTORS,
    ),
    "BuildFailureWeigher": Subject(
        f"{WEIGHTS}.compute", multiplier("build_failure"), "build_failure_weight_multiplier", FACTORS
    ),
    "MetricsWeigher": Subject(f"{WEIGHTS}.metrics", weighed_metrics, "metrics_weight_multiplier", FACTORS),
}


def row(rng: random.Random, at: int, *, is_written: bool) -> dict[str, Any]:
    """A row as a nova-compute writes it, now and then one that it has not written yet."""
    stats: dict[str, Any] = {"num_proj_p": 3, "boot_mode": "uefi"}
    for name, most in (("num_instances", 60), ("io_workload", 12), ("failed_builds", 4)):
        if rng.random() < 0.9:
            number = rng.randrange(-1, most) if rng.random() < 0.8 else 0
            stats[name] = rng.choice((number, number, str(number)))
    metrics = [
        {
            "name": name,
            "value": rng.choice((0.27, 0.5, 0, 1)) if name.endswith("percent") else rng.randrange(5000),
            "timestamp": "2026-01-01T00:00:00.000000",
            "source": "s",
        }
        for name in METRICS
        if rng.random() < 0.85
    ]
    return {
        "id": at + 1,
        "uuid": f"00000000-0000-4000-8000-{at:012}",
        "host": f"h{at}",
        "hypervisor_hostname": f"h{at}",
        "hypervisor_version": rng.choice((8002000, 4001000, 10000000, 8002000, 0)),
        "free_disk_gb": 5 if is_written or rng.random() < 0.9 else None,
        "stats": "{}" if rng.random() < 0.05 else json.dumps(stats),
        "metrics": None if rng.random() < 0.05 else json.dumps(metrics),
        "supported_instances": '[["x86_64", "kvm", "hvm"]]',
    }


def drawn(rng: random.Random, name: str) -> dict[str, Any]:
    """A case for a class: rows, the aggregates of each host, an image and options."""
    one = SUBJECTS[name]
    values = rng.sample(one.values, 3 if one.values else 0)
    known = [{one.metadata: value} if rng.random() < 0.9 else {"z": "1"} for value in values]
    # Nova's MetricsFilter fails of a row that was not written yet, and the version comes by its API.
    is_written = name in ("MetricsFilter", "HypervisorVersionWeigher")
    return {
        "class": name,
        "module": one.module,
        "weighs": one.weighs,
        "options": one.options(rng),
        "rows": [row(rng, at, is_written=is_written) for at in range(HOSTS)],
        "aggregates": [[of for of in known if rng.random() < 0.3] for _ in range(HOSTS)],
        "image": rng.choice((None, *IMAGES)),
    }


class MemoryRows:
    """A cell's database."""

    cell = CELL

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    async def read(self) -> CellRead:
        return CellRead(present=[one["id"] for one in self._rows], changed=parse_rows(self._rows))


def settings_of(case: dict[str, Any]) -> Settings:
    """The options as `berth nova settings` translates them."""
    groups: dict[str, list[str]] = {}
    for group, option, text in case["options"]:
        groups.setdefault(group, []).append(f"{option} = {text}")
    conf = "\n".join(line for group, lines in groups.items() for line in (f"[{group}]", *lines))
    found = translate(conf.encode())
    assert not found.left_out, found.left_out
    return convert(found.settings, Settings)


async def ours(case: dict[str, Any]) -> list[Any]:
    """The same as `nova_facts.answer`, as the front decides it."""
    table, replica, rows = host_table(), Replica(), case["rows"]
    nova_state = NovaState(table)
    nova_state.put_services([NovaService(host=one["host"], is_up=True) for one in rows], complete=True)
    nova_state.put_nodes(
        [
            ComputeNode(
                uuid=one["uuid"],
                host=one["host"],
                nodename=one["hypervisor_hostname"],
                hypervisor_version=one["hypervisor_version"],
            )
            for one in rows
        ],
        complete=True,
    )
    nova_state.put_cells({one["host"]: CELL for one in rows})
    members: dict[str, tuple[dict[str, str], list[str]]] = {}
    for one, aggregates in zip(rows, case["aggregates"], strict=True):
        for metadata in aggregates:
            members.setdefault(json.dumps(metadata), (metadata, []))[1].append(one["host"])
    nova_state.put_aggregates(
        [
            NovaAggregate(uuid=name, name=name, metadata=metadata, hosts=tuple(hosts))
            for name, (metadata, hosts) in members.items()
        ],
        complete=True,
    )
    nova_state.announce(0.0)
    replica.load(
        [
            ProviderState(
                uuid=one["uuid"],
                name=one["host"],
                root_uuid=one["uuid"],
                generation=1,
                spec_generation=1,
                inventories={},
            )
            for one in rows
        ],
        0,
    )
    config = replace(
        settings_of(case).scheduler,
        available_filters=HOST_FACT_FILTERS,
        enabled_filters=() if case["weighs"] else (case["class"],),
        enabled_weighers=(case["class"],) if case["weighs"] else (),
        aggregates=nova_state.aggregates(),
    )
    made = SelectorConfig(
        config,
        flavors={},
        filters=plugins.filters(config),
        weighings=plugins.weighings(config),
        membership=nova_state.membership(),
    )
    selector = Selector(replica, table, made)
    poller = HostFactsPoller(
        [MemoryRows(rows)],
        HostFacts([CELL], max_age_s=60),
        nova_state,
        table,
        selector.metrics,
        weighed=sorted(config.metrics.weights),
        interval_s=5,
        hosts_known=asyncio.Event(),
        clock=SystemClock(),
    )
    await poller.read(MemoryRows(rows))
    view, spec = selector.all_hosts(), RequestSpec(query=Query(), flavor="f", project_id="p", image=case["image"] or "")
    order = [view.replica.name_of(at) for at in view.rows.tolist()]
    if case["weighs"]:
        found: list[Any] = score(view, spec, made.weighings)[0].tolist()
    else:
        found = made.filters[0].filter(view, spec).passed.tolist()
    return [found[order.index(one["host"])] for one in rows]


def is_same(one: Any, other: Any) -> bool:
    return one == other if isinstance(one, bool) else math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def compare(nova: Nova, name: str, pairs: int, seed: int) -> bool:
    """Whether a class decides as Nova's does, on so many hosts; what it found is printed."""
    rng, seen, different = random.Random(f"{seed} {name}"), Counter[str](), 0
    for _ in range(pairs // HOSTS):
        case = drawn(rng, name)
        nova.say(case)
        theirs, mine = nova.hear(), asyncio.run(ours(case))
        seen.update("yes" if one else "no" for one in theirs)
        if not all(map(is_same, theirs, mine)):
            different += 1
            if different == 1:
                say(f"{name}: Nova {theirs}, berth {mine}, of {json.dumps(case)}")
    total = seen.total()
    is_even = SUBJECTS[name].weighs or min(seen["yes"], seen["no"]) >= LEAST_SHARE * total
    kinds = f"{seen['yes']} not 0" if SUBJECTS[name].weighs else f"{seen['yes']} pass, {seen['no']} do not"
    say(f"{name}: {total} pairs, {kinds}; {different} of {total // HOSTS} cases differ{'' if is_even else '; TOO FEW'}")
    return not different and is_even


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--nova", required=True, help="a Python that has Nova")
    given.add_argument("--pairs", type=int, default=2_000, help="of a host and a request, for each class")
    given.add_argument("--seed", type=int, default=1)
    given.add_argument("--only", choices=sorted(SUBJECTS), action="append")
    options = given.parse_args()
    nova = Nova(options.nova, NOVAS_SIDE, "cases")
    found = [compare(nova, name, options.pairs, options.seed) for name in options.only or SUBJECTS]
    nova.end()
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
