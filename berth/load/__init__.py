"""The load generator: many builds at once, at a rate, or so many at a time; and what came of them."""

from berth.load.plan import LoadPlan, PlanError, draw_requests
from berth.load.run import LoadRun, run_load
from berth.load.summary import Failure, LoadReport, percentiles, sum_up

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
