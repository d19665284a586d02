"""The interfaces of filters and weighers, which work on columns of hosts. A result carries its reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol, TypeGuard

import numpy as np
from msgspec import Struct

from bus.contracts.placement import ClaimOption
from scheduler_worker.config import Aggregate
from scheduler_worker.hosts.host_table import Floats, Mask
from scheduler_worker.selection.host_view import HostsView, HostView, Membership
from scheduler_worker.selection.request_spec import RequestSpec, options_on

MAX_JUDGED_OPTIONS = 64  # of one host, of which the first that suit are kept
Mappings = Mapping[str, Sequence[str]]  # the providers (uuids) of each group of the request, in one option


class FilterResult(Struct, frozen=True):
    """A filter's result: `passed` per row of the view, `rejected`: {reason: hosts}."""

    passed: Mask
    rejected: Mapping[str, int]


class Filter(Protocol):
    """Decides which hosts may take a build. `name` appears in the funnel. It must not change what it is given."""

    name: ClassVar[str]

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """A result over all hosts of the view at once."""


class OptionFilter(Filter, Protocol):
    """A filter that also judges what would be claimed on a host, as the host is drawn: choices that were made since the
    hosts were ranked may have left no room there.
    """

    def suiting(self, host: HostsView, spec: RequestSpec, options: Sequence[Mappings]) -> list[int]:
        """Which of a host's options do, by their numbers. host: the view of it alone."""


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


class InFlight(Protocol):
    """Counts choices on their hosts in what placement does not count, from the choice until the host counts them."""

    def assume(self, instance: str, host: str, spec: RequestSpec, mappings: Mappings) -> None:
        """A host (uuid) was chosen, instead of an earlier choice."""

    def claimed(self, instance: str, host: str, spec: RequestSpec, mappings: Mappings) -> None:
        """The instance holds a claim on a host, whatever was assumed."""

    def drop(self, instance: str) -> None:
        """What was assumed is not claimed."""


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


def judges_options(plugin: Filter) -> TypeGuard[OptionFilter]:
    """Whether it is an `OptionFilter`."""
    return callable(getattr(plugin, "suiting", None))


def options_of(host: HostsView, spec: RequestSpec, judges: Sequence[OptionFilter], *, limit: int) -> list[ClaimOption]:
    """The possible allocations on a host that all of these filters let pass, best first. host: the view of it alone.
    Raises QueryTooWide.
    """
    found = options_on(host.replica, spec, int(host.rows[0]), limit=MAX_JUDGED_OPTIONS)
    for one in judges:
        found = [found[number] for number in one.suiting(host, spec, [option.mappings for option in found])]
    return found[:limit]


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
    return type(plugin).__module__.startswith(("scheduler_worker.", "nova_scheduler."))


NONE_REJECTED: Mapping[str, int] = {}


def filter_result_of(passed: Mask, reason: str) -> FilterResult:
    """A result that rejects all hosts for the same reason."""
    return FilterResult(passed, {reason: int(passed.size - np.count_nonzero(passed))})


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
