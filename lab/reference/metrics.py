"""docs/reference/metrics.md: every Prometheus metric, read from the registry once all workers are imported."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Sequence
from types import ModuleType

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

import bus
import cell_conductor
import compute_agent
import gateway
import ironic_sync
import nova_scheduler
import placement_worker
import scheduler_worker


def content() -> dict[str, object]:
    """What the page shows: the metrics of each package that exports any."""
    workers = (placement_worker, scheduler_worker, nova_scheduler, cell_conductor, compute_agent, ironic_sync, gateway)
    packages = (bus, *workers)
    found = ((one.__name__, sorted([*map(_row, _metrics(one)), *_families(one)])) for one in packages)
    return {"packages": [(name, rows) for name, rows in found if rows]}


def _values(package: ModuleType) -> Iterator[object]:
    """The definitions of the modules of this package."""
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if ".migrations" in info.name or info.name.endswith("__main__") or ".alembic" in info.name:
            continue
        yield from vars(importlib.import_module(info.name)).values()


def _metrics(package: ModuleType) -> Iterator[MetricWrapperBase]:
    """Each metric that a module of this package defines, once."""
    seen: set[int] = set()
    for value in _values(package):
        for metric in value if isinstance(value, tuple) else (value,):
            if isinstance(metric, MetricWrapperBase) and id(metric) not in seen:
                seen.add(id(metric))
                yield metric


def _families(package: ModuleType) -> Iterator[str]:
    """A row for each gauge of a collector, which computes its gauges when it is scraped."""
    collectors = {id(value): value for value in _values(package) if Collector in type(value).__mro__}
    for collector in collectors.values():
        if type(collector).__module__.startswith(f"{package.__name__}."):
            for family in collector.describe():  # type: ignore[attr-defined]
                yield _line(family.name, family.type, family._labelnames, family.documentation)


def _row(metric: MetricWrapperBase) -> str:
    suffix = "_total" if metric._type == "counter" else ""
    return _line(metric._name + suffix, str(metric._type), metric._labelnames, metric._documentation)


def _line(name: str, kind: str, labels: Sequence[str], meaning: str) -> str:
    return f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {meaning} |".replace("  ", " ")
