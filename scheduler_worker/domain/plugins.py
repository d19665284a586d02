"""What a filter and a weigher are (F-plug). Verdicts are values with reasons; both work on columns of hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import ClassVar, Protocol

import numpy as np
from msgspec import Struct

from scheduler_worker.domain.hosts import Floats, Mask
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView, HostView


class Verdict(Struct, frozen=True):
    """What a filter says: `passed` per row of the view, and how many fell for which reason."""

    passed: Mask
    rejected: Mapping[str, int]


class Filter(Protocol):
    """Says which hosts may take a build. `name` appears in the funnel; it must not change anything it sees."""

    name: ClassVar[str]

    def judge(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """A verdict over all hosts of the view at once."""


class HostFilter:
    """Base for a filter that looks at one host at a time: write `reason_against`. Simple, and slow past 1,000 hosts."""

    name: ClassVar[str] = ""

    def reason_against(self, host: HostView, spec: RequestSpec) -> str | None:
        """Why this host may not take the build (a stable word), or None when it may."""
        raise NotImplementedError

    def judge(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """Ask about every host in turn."""
        reasons = [self.reason_against(view.host(row), spec) for row in range(len(view))]
        passed = np.array([reason is None for reason in reasons], dtype=np.bool_)
        return Verdict(passed, dict(Counter(reason for reason in reasons if reason is not None)))


class Weigher(Protocol):
    """Says how much it likes each host, as a number of any scale; the framework normalises (W-0).

    name: `ram` is set by `multipliers.ram` and by aggregate metadata `ram_weight_multiplier`. minimum and maximum:
    raw weights are clamped to these and scaled between them; None = the smallest or largest seen. sign: -1 where
    less is better, so that a multiplier is always written as a positive number.
    """

    name: ClassVar[str]
    multiplier: ClassVar[float]
    sign: ClassVar[float]
    minimum: ClassVar[float | None]
    maximum: ClassVar[float | None]

    def weigh(self, view: HostsView, spec: RequestSpec) -> Floats:
        """The raw weight of every host of the view."""


class Weighing(Struct, frozen=True):
    """A weigher and the multiplier that the operator gave it."""

    weigher: Weigher
    multiplier: float


def applies_to(plugin: Filter | Weigher, spec: RequestSpec) -> bool:
    """Whether a filter or weigher has anything to say of a request: it may have a `applies_to(spec)` that says no.

    Then it costs nothing, and a funnel does not speak of it.
    """
    asks = getattr(plugin, "applies_to", None)
    return asks is None or bool(asks(spec))


NONE_REJECTED: Mapping[str, int] = {}


def one_reason(passed: Mask, reason: str) -> Verdict:
    """A verdict whose fallen all fell for the same reason."""
    fallen = int(passed.size - np.count_nonzero(passed))
    return Verdict(passed, {reason: fallen} if fallen else NONE_REJECTED)
