"""docs/reference/metrics.md: every Prometheus metric, read from the registry once all workers are imported."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from prometheus_client.metrics import MetricWrapperBase

import bus
import cell_conductor
import compute_sim
import ironic_sync
import placement_worker
import scheduler_worker

HEAD = """\
# Metrics

Derived from the code by `scripts/docs`; do not edit by hand.

A worker that is given a port (`--http 127.0.0.1:9100`) serves these at `/metrics` in Prometheus' text format. A
counter's name carries the suffix `_total` there; a histogram has `_bucket`, `_sum` and `_count`. Times are seconds.
"""


def render() -> str:
    """The whole page: one table per package that exports metrics."""
    lines = [HEAD]
    for package in (bus, placement_worker, scheduler_worker, cell_conductor, compute_sim, ironic_sync):
        found = sorted(_metrics(package), key=lambda metric: str(metric._name))
        if found:
            lines += [f"## {package.__name__}\n", "| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
            lines += [_row(metric) for metric in found]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _metrics(package: ModuleType) -> Iterator[MetricWrapperBase]:
    """Each metric that a module of this package defines, once."""
    seen: set[int] = set()
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if ".migrations" in info.name or info.name.endswith("__main__") or ".alembic" in info.name:
            continue
        for value in vars(importlib.import_module(info.name)).values():
            for metric in value if isinstance(value, tuple) else (value,):
                if isinstance(metric, MetricWrapperBase) and id(metric) not in seen:
                    seen.add(id(metric))
                    yield metric


def _row(metric: MetricWrapperBase) -> str:
    name, kind = metric._name, metric._type
    suffix = "_total" if kind == "counter" else ""
    labels = ", ".join(f"`{label}`" for label in metric._labelnames)
    return f"| `{name}{suffix}` | {kind} | {labels} | {metric._documentation} |".replace("  ", " ")
