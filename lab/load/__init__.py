"""The load generator: many builds at once, at a rate, or so many at a time; and what came of them."""

from __future__ import annotations

from lab.load.plan import LoadPlan, PlanError, draw_requests
from lab.load.report.summary import Failure, LoadReport, percentiles, sum_up
from lab.load.run import LoadRun, run_load

__all__ = [
    "Failure",
    "LoadPlan",
    "LoadReport",
    "LoadRun",
    "PlanError",
    "draw_requests",
    "percentiles",
    "run_load",
    "sum_up",
]
