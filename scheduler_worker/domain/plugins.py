"""The interfaces of filters and weighers, which work on columns of hosts; and how weighers combine, as in Nova's
`weights.py`: clamp, scale to 0..1, multiply, add up. A result carries its reasons.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from scheduler_worker.config import Aggregate
from scheduler_worker.domain.hosts import Floats, Mask
from scheduler_worker.domain.view import HostsView, HostView, Membership, RequestSpec


class FilterResult(Struct, frozen=True):
    """A filter's result: `passed` per row of the view, `rejected`: {reason: hosts}."""

    passed: Mask
    rejected: Mapping[str, int]


class Filter(Protocol):
    """Decides which hosts may take a build. `name` appears in the funnel. It must not change what it is given."""

    name: ClassVar[str]

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """A result over all hosts of the view at once."""


class HostFilter:
    """Base of a filter that looks at one host at a time: override `rejection_reason`. Slow beyond 1,000 hosts."""

    name: ClassVar[str] = ""

    def rejection_reason(self, host: HostView, spec: RequestSpec) -> str | None:
        """The reason why this host may not take the build (a stable code), or None when it may."""
        raise NotImplementedError

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """Check every host in turn."""
        reasons = [self.rejection_reason(view.host(row), spec) for row in range(len(view))]
        passed = np.array([reason is None for reason in reasons], dtype=np.bool_)
        return FilterResult(passed, dict(Counter(reason for reason in reasons if reason is not None)))


class Weigher(Protocol):
    """Gives each host a number of any scale, more is better; the framework normalises it."""

    name: ClassVar[str]  # `ram` is set by `multipliers.ram` and by aggregate metadata `ram_weight_multiplier`
    multiplier: ClassVar[float] = 1.0
    sign: ClassVar[float] = 1.0  # -1 where less is better, so that a multiplier is always written as a positive number
    # minimum, maximum: raw weights are clamped to these and scaled between them (None: the smallest or largest seen)
    minimum: ClassVar[float | None] = None
    maximum: ClassVar[float | None] = None

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """The raw weight of every host of the view."""


class Weighing(Struct, frozen=True):
    """A weigher and the multiplier that the operator gave it."""

    weigher: Weigher
    multiplier: float


def applies_to(plugin: Filter | Weigher, spec: RequestSpec) -> bool:
    """Whether a filter or weigher is run for a request: its method `applies_to(spec)`, if it has one, may return False.

    Then it is skipped, and is not in the funnel.
    """
    applies = getattr(plugin, "applies_to", None)
    return applies is None or bool(applies(spec))


def runs_on_rebuild(plugin: Filter) -> bool:
    """Whether a filter is run for a rebuild from another image, on the host that the instance is on.

    Its attribute `run_on_rebuild`, if it has one: True where it looks at the image (as Nova's RUN_ON_REBUILD).
    """
    return bool(getattr(plugin, "run_on_rebuild", False))


def reads_image_property(plugin: Filter, name: str, membership: Membership) -> bool:
    """Whether one of berth's own filters reads this property of images: its method of this name, if it has one."""
    reads = getattr(plugin, "reads_image_property", None)
    return reads is not None and bool(reads(name, membership))


def is_own(plugin: Filter | Weigher) -> bool:
    """Whether it is one of berth's own plug-ins, so that it is known which requests' peers it reads."""
    return type(plugin).__module__.startswith("scheduler_worker.")


NONE_REJECTED: Mapping[str, int] = {}


def filter_result_of(passed: Mask, reason: str) -> FilterResult:
    """A result that rejects all hosts for the same reason."""
    return FilterResult(passed, {reason: int(passed.size - np.count_nonzero(passed))})


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


def filter_result_of_members(
    view: HostsView, restricting: Sequence[Aggregate], admits: Callable[[Aggregate], bool], reason: str
) -> FilterResult:
    """A result that rejects the hosts in any of these aggregates of which none admits the request."""
    if not restricting:
        return FilterResult(np.ones(len(view), dtype=np.bool_), NONE_REJECTED)
    restricted = np.zeros(len(view), dtype=np.bool_)
    allowed = np.zeros(len(view), dtype=np.bool_)
    for aggregate in restricting:
        members = view.member_of(aggregate.uuid)
        restricted |= members
        if admits(aggregate):
            allowed |= members
    return filter_result_of(~restricted | allowed, reason)
