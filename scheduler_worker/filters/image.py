"""Do the image and the host suit each other: is the host kept for other images, or can it not run this one?"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from scheduler_worker.config import SchedulerConfig
from scheduler_worker.hosts.host_table import Mask
from scheduler_worker.selection.host_view import VERSION, HostsView, Membership
from scheduler_worker.selection.plugin import NONE_REJECTED, FilterResult, filter_result_of
from scheduler_worker.selection.request_spec import RequestSpec


class AggregateImagePropertiesIsolation:
    """Where an aggregate's metadata (a value, or a comma list) has a property of the image, the values must match, as
    in Nova. A property that only one of the two has restricts nothing.
    """

    name: ClassVar[str] = "AggregateImagePropertiesIsolation"
    run_on_rebuild: ClassVar[bool] = True

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to images with properties."""
        return bool(spec.image_properties)

    def reads_image_property(self, name: str, membership: Membership) -> bool:
        """Whether some aggregate has it."""
        return membership.has_key(name)

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """Each property in turn; a host is rejected by the first that does not match."""
        passed = np.ones(len(view), dtype=np.bool_)
        rejected: Counter[str] = Counter()
        for key, value in sorted(spec.image_properties.items()):
            named = np.zeros(len(view), dtype=np.bool_)
            met = np.zeros(len(view), dtype=np.bool_)
            for aggregate in view.membership.with_key(key):
                members = view.member_of(aggregate.uuid)
                named |= members
                if value in {word.strip() for word in aggregate.metadata[key].split(",")}:
                    met |= members
            rejected[f"image.{key}"] += int(np.count_nonzero(passed & named & ~met))
            passed &= ~named | met
        return FilterResult(passed, {reason: count for reason, count in rejected.items() if count} or NONE_REJECTED)


class IsolatedHostsFilter:
    """Keeps `isolated_images` on the hosts of the services in `isolated_hosts`, and other images away from these if
    `restrict_isolated_hosts_to_isolated_images`. As in Nova, without isolated images only the latter counts.
    """

    name: ClassVar[str] = "IsolatedHostsFilter"
    run_on_rebuild: ClassVar[bool] = True

    def __init__(self, hosts: Collection[str] = (), images: Collection[str] = (), *, restricts: bool = True) -> None:
        self._hosts = frozenset(hosts)
        self._images = frozenset(images)
        self._restricts = restricts

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> Self:
        """The lists of these settings."""
        restricts = config.restrict_isolated_hosts_to_isolated_images
        return cls(config.isolated_hosts, config.isolated_images, restricts=restricts)

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """By the names of the hosts' services and the image's id."""
        states = view.table.services.states
        isolated = np.isin(view.service, [at for at, state in enumerate(states) if state.name in self._hosts])
        passed = np.ones(len(view), dtype=np.bool_)
        if spec.image in self._images:
            passed = isolated
        elif self._restricts:
            passed = ~isolated
        return filter_result_of(passed, "image.isolated")


# The properties of an image, in the order of a host's triples.
PROPERTIES = ("hw_architecture", "img_hv_type", "hw_vm_mode")
# The attributes that a host reports: `architecture/hypervisor/mode` triples, comma-separated, in which ANY is each; the
# version of its hypervisor (VERSION); how wide its addresses are.
SUPPORTED = "supported_instances"
ANY = "*"
ADDRESS_BITS = "cpu_info:maxphysaddr:bits"
# What an image requests of these.
WANTED_VERSION, WANTED_BITS = "img_hv_requested_version", "hw_maxphysaddr_bits"
MAX_RANGE = 255  # characters of such a range, as Nova keeps an image's properties
_PREDICATE = re.compile(r"(<=|>=|<|>|!=|==)\s*(\d{1,9}(?:\.\d{1,9}){0,3})")
_COMPARED: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "!=": operator.ne, "==": operator.eq,
}  # fmt: skip


class ImagePropertiesFilter:
    """Compares the image's architecture, hypervisor type and VM mode with those that the host reports."""

    # As in Nova: one triple must have all properties of the image. An image without them runs anywhere; an image with
    # them does not run on a host that reports nothing. For an image with one of them the hypervisor's version and the
    # width of addresses count as well, on a host that reports these.

    name: ClassVar[str] = "ImagePropertiesFilter"
    run_on_rebuild: ClassVar[bool] = True

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to images with one of these properties."""
        return any(spec.image_properties.get(key) for key in PROPERTIES)

    def reads_image_property(self, name: str, membership: Membership) -> bool:
        """Whether hosts report it."""
        return name in (*PROPERTIES, WANTED_VERSION, WANTED_BITS)

    def filter(self, view: HostsView, spec: RequestSpec) -> FilterResult:
        """Hosts report the same few lists, so each distinct one is compared once."""
        requested = [spec.image_properties.get(key, "").lower() for key in PROPERTIES]
        words = view.attribute(SUPPORTED)
        results = {word: supports(word, requested) for word in set(words)}
        passed = np.array([results[word] for word in words], dtype=np.bool_)
        if wanted := spec.image_properties.get(WANTED_VERSION):
            passed &= _each(view.attribute(VERSION), lambda has: is_version(has, wanted))
        if (bits := spec.image_properties.get(WANTED_BITS, "")[:MAX_RANGE]).isdecimal():
            passed &= _each(view.attribute(ADDRESS_BITS), lambda has: not has.isdecimal() or int(has) >= int(bits))
        return filter_result_of(passed, "image.not_supported")


def _each(values: Sequence[str | None], suits: Callable[[str], bool]) -> Mask:
    """Per host, whether what it reports suits; a host that reports nothing does."""
    results = {value: suits(value) for value in set(values) if value}
    return np.array([results.get(value or "", True) for value in values], dtype=np.bool_)


def is_version(reported: str, wanted: str) -> bool:
    """Whether a version is in the range that an image requests (">=2.6, <9"); a range that cannot be read has none."""
    if not reported.isdecimal():
        return True
    if len(wanted) > MAX_RANGE:
        return False
    number = int(reported)
    have = [number // 1_000_000, number // 1000 % 1000, number % 1000, 0]
    for part in wanted.split(","):
        found = _PREDICATE.fullmatch(part.strip())
        if found is None:
            return False
        version = [int(word) for word in found[2].split(".")]
        if not _COMPARED[found[1]](have, version + [0] * (len(have) - len(version))):
            return False
    return True


def supports(reported: str | None, requested: list[str]) -> bool:
    """Whether one of the reported triples has everything that is required (an empty string requires nothing)."""
    triples = [[word.strip().lower() for word in triple.split("/")] for triple in (reported or "").split(",")]
    return any(
        len(triple) == len(requested)
        and all(want in ("", have) or have == ANY for have, want in zip(triple, requested, strict=True))
        for triple in triples
    )
