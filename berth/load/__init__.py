"""The load generator: many builds at once, at a rate, or so many at a time; and what came of them."""

from berth.load.run import Failure, LoadPlan, LoadReport, draw_requests, percentiles, run_load, sum_up

__all__ = ["Failure", "LoadPlan", "LoadReport", "draw_requests", "percentiles", "run_load", "sum_up"]
