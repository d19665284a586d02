"""The figures that a report and a comparison read off a record: columns as arrays, percentiles, and rates over time."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from lab.load.record import OUTCOMES, STAGES, Column, LoadRecord, Operations
from lab.load.report.charts import rounded

Array = npt.NDArray[np.float64]

PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}
# Below a tenth of a millisecond nothing of ours is measured; a logarithm needs some floor.
LEAST_MS = 0.1
# A plot has at most so many points; a screen shows no more.
MAX_POINTS = 160
# The run is cut into at most so many pieces: boots end in batches, and shorter ones would show nothing but those.
MAX_PIECES = 80
# Shorter pieces hold a boot or none, and a rate of them means nothing: so many each, unless that leaves too few pieces.
LEAST_STEP_S = 0.05
BOOTS_A_PIECE = 20
LEAST_PIECES = 20
# A time later than ten years after the start is no time of a load run.
MAX_TIME_S = 3e8


def column(values: Column | Sequence[float]) -> Array:
    """A column as an array; what is not known, not finite or no time of a run is NaN."""
    found = np.array(values, dtype=np.float64)
    found[~(np.abs(found) <= MAX_TIME_S)] = np.nan
    return found


def having(rows: Operations, outcome: str) -> npt.NDArray[np.bool_]:
    """Which rows ended so."""
    found: npt.NDArray[np.bool_] = np.array(rows.outcome, dtype=np.int64) == OUTCOMES.index(outcome)
    return found


def latencies_ms(rows: Operations, outcome: str = "active") -> Array:
    """Of every row that ended so, in the order in which they were meant to leave; from the intended time."""
    intended, ended = column(rows.intended_s), column(rows.ended_s)
    chosen = having(rows, outcome) & np.isfinite(ended) & np.isfinite(intended)
    order = np.argsort(intended[chosen], kind="stable")
    return np.maximum(1000 * (ended - intended)[chosen][order], 0.0)


def stages_ms(rows: Operations) -> dict[str, Array]:
    """Of every stage that was reported, in the order of STAGES; boots as they were meant to leave."""
    chosen = np.flatnonzero(having(rows, "active"))
    chosen = chosen[np.argsort(column(rows.intended_s)[chosen], kind="stable")]
    found = {stage: 1000 * column(rows.stages[stage])[chosen] for stage in STAGES if stage in rows.stages}
    known = {stage: np.maximum(values[np.isfinite(values)], 0.0) for stage, values in found.items()}
    return {stage: values for stage, values in known.items() if values.size}


def summary(values: Array) -> dict[str, float]:
    """Percentiles by nearest rank, maximum and mean; empty when there is nothing."""
    if not values.size:
        return {}
    ranks = np.quantile(values, list(PERCENTILES.values()), method="inverted_cdf")
    return dict(zip(PERCENTILES, ranks.tolist(), strict=True)) | {
        "max": float(values.max()),
        "mean": float(values.mean()),
    }


class Timeline:
    """The run cut into equal pieces of a round length."""

    def __init__(self, record: LoadRecord) -> None:
        times = [column(rows.ended_s) for rows in (record.boots, record.deletes)]
        times += [column(rows.intended_s) for rows in (record.boots, record.deletes)]
        last = max((float(np.nanmax(found)) for found in times if np.isfinite(found).any()), default=0.0)
        self.seconds = max(last, 1e-3)
        pieces = min(max(len(record.boots) // BOOTS_A_PIECE, LEAST_PIECES), MAX_PIECES)
        self.step = rounded(max(self.seconds / pieces, LEAST_STEP_S))
        self.edges = np.arange(0.0, self.seconds + self.step, self.step)
        self.middles: list[float] = (self.edges[:-1] + self.step / 2).tolist()

    def rate(self, times: Array) -> list[float | None]:
        """So many a second in each piece."""
        counts, _ = np.histogram(times[np.isfinite(times)], bins=self.edges)
        return [float(count) / self.step for count in counts]

    def in_flight(self, sent: Array, ended: Array) -> list[float | None]:
        """So many had been sent and not ended, at the end of each piece."""
        begun, over = (np.sort(times[np.isfinite(times)]) for times in (sent, ended))
        at = self.edges[1:]
        open_ = np.searchsorted(begun, at, side="right") - np.searchsorted(over, at, side="right")
        return [float(max(count, 0)) for count in open_]

    def quantiles(self, times: Array, values: Array, share: float) -> list[float | None]:
        """A percentile of the values whose time is in each piece; None where there are none."""
        known = np.isfinite(times) & np.isfinite(values)
        places = np.searchsorted(self.edges, times[known], side="right") - 1
        kept = values[known]
        order = np.argsort(places, kind="stable")
        cuts = np.searchsorted(places[order], np.arange(len(self.middles) + 1))
        groups = [kept[order][low:high] for low, high in itertools.pairwise(cuts)]
        return [float(np.quantile(g, share, method="inverted_cdf")) if g.size else None for g in groups]


def thinned(at: Sequence[float], columns: Mapping[str, Column]) -> tuple[list[float], dict[str, list[float | None]]]:
    """At most MAX_POINTS rows, of each group the highest value: a peak is what one looks for."""
    size = max(1, -(-len(at) // MAX_POINTS))
    groups = range(0, len(at), size)
    highest = {
        name: [max((v for v in values[low : low + size] if v is not None), default=None) for low in groups]
        for name, values in columns.items()
    }
    return [at[low] for low in groups], highest


def per_second(at: Sequence[float], cumulative: Sequence[float | None]) -> Column:
    """How fast a counter rose between rows; one that fell was started anew."""
    rates: Column = []
    before: tuple[float, float] | None = None
    for moment, count in zip(at, cumulative, strict=True):
        if count is None:
            rates.append(None)
            continue
        then, known = before if before is not None else (0.0, 0)
        rates.append(max(count - known, 0) / (moment - then) if moment > then else None)
        before = (moment, count)
    return rates
