"""Weighers combined as in Nova: clamp, scale to 0..1, multiply, add up."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from scheduler_worker.hosts.host_table import Floats
from scheduler_worker.selection.host_view import HostsView, Membership
from scheduler_worker.selection.plugin import Weigher, Weighing, applies_to
from scheduler_worker.selection.request_spec import RequestSpec

# The weights of more hosts than this are not kept by weigher: they would take 8 bytes a host, weigher and ranking.
KEPT_HOSTS = 20_000


class Scale(Struct, frozen=True):
    """One weigher's scale over a set of hosts: the raw weight of 0, and the span to 1 (0: all hosts weigh 0)."""

    weighing: Weighing
    low: float
    span: float
    weights: Floats | None = None  # of each host on it; None: not kept


def clamp(weigher: Weigher, raw: Floats) -> Floats:
    """Raw weights within the weigher's own bounds."""
    # Not np.clip: for the one host that each pick weighs again, its overhead is larger than the work.
    if weigher.minimum is not None:
        raw = np.maximum(raw, weigher.minimum)
    if weigher.maximum is not None:
        raw = np.minimum(raw, weigher.maximum)
    return raw


def scale_of(weighing: Weighing, clamped: Floats) -> Scale:
    """Between the weigher's bounds where it has them, else between the smallest and largest seen."""
    weigher = weighing.weigher
    low = float(clamped.min()) if weigher.minimum is None else weigher.minimum
    high = float(clamped.max()) if weigher.maximum is None else weigher.maximum
    return Scale(weighing, low, high - low)


def score(view: HostsView, spec: RequestSpec, weighings: Sequence[Weighing]) -> tuple[Floats, list[Scale]]:
    """Every host's sum of weights, and the scales that make a later score of some of them comparable: of the weighers
    in which the hosts differ. A single host is not weighed.
    """
    total = np.zeros(len(view), dtype=np.float64)
    scales: list[Scale] = []
    if len(view) <= 1:
        return total, scales
    for weighing in weighings:
        if not applies_to(weighing.weigher, spec):
            continue
        clamped = clamp(weighing.weigher, weighing.weigher.weigh(view, spec))
        scale = scale_of(weighing, clamped)
        if not scale.span:
            continue
        weights = _weights(view, scale, clamped)
        scales.append(replace(scale, weights=weights) if len(view) <= KEPT_HOSTS else scale)
        total += weights
    return total, scales


def reweigh(view: HostsView, spec: RequestSpec, scales: Sequence[Scale]) -> list[tuple[Scale, Floats]]:
    """The weights of some hosts on each of the scales, after their free amounts have changed."""
    return [
        (scale, _weights(view, scale, clamp(scale.weighing.weigher, scale.weighing.weigher.weigh(view, spec))))
        for scale in scales
    ]


def _weights(view: HostsView, scale: Scale, clamped: Floats) -> Floats:
    return (clamped - scale.low) / scale.span * multipliers(view, scale.weighing)


def multipliers(view: HostsView, weighing: Weighing) -> Floats | float:
    """Per host: its aggregates' `<name>_weight_multiplier`, the smallest wins; else the operator's setting.

    For hosts of an aggregate whose value is not a number the setting holds.
    """
    weigher = weighing.weigher
    key = f"{weigher.name}_weight_multiplier"
    if not view.membership.has_key(key):
        return weighing.multiplier * weigher.sign
    return weigher.sign * _by_aggregate(view, view.membership, key, weighing.multiplier)


def _by_aggregate(view: HostsView, membership: Membership, key: str, setting: float) -> Floats:
    smallest = np.full(len(view), np.inf)
    unreadable = np.zeros(len(view), dtype=np.bool_)
    for aggregate in membership.with_key(key):
        members = view.member_of(aggregate.uuid)
        try:
            value = float(aggregate.metadata[key])
        except ValueError:
            value = math.nan
        if math.isnan(value):
            unreadable |= members
        else:
            smallest = np.where(members, np.minimum(smallest, value), smallest)
    return np.where(unreadable | np.isinf(smallest), setting, smallest)
