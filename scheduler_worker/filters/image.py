"""Do the image and the host suit each other: is the host kept for other images, or can it not run this one?"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np

from scheduler_worker.domain.plugins import NONE_REJECTED, Verdict, verdict_of
from scheduler_worker.domain.view import HostsView, Membership, RequestSpec


class AggregateImagePropertiesIsolation:
    """Where an aggregate's metadata has a property that the image has too, the values must match.

    As in Nova: the aggregate may have a comma list. A property that no aggregate of the host has, or that the image
    does not have, restricts nothing.
    """

    name: ClassVar[str] = "AggregateImagePropertiesIsolation"
    run_on_rebuild: ClassVar[bool] = True

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to images with properties."""
        return bool(spec.image_properties)

    def reads_image_property(self, name: str, membership: Membership) -> bool:
        """Whether some aggregate has it."""
        return membership.has_key(name)

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
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
        return Verdict(passed, {reason: count for reason, count in rejected.items() if count} or NONE_REJECTED)


# The properties of an image, in the order of a host's triples.
PROPERTIES = ("hw_architecture", "img_hv_type", "hw_vm_mode")
# The attribute that a host announces: `architecture/hypervisor/mode` triples, comma-separated.
SUPPORTED = "supported_instances"


class ImagePropertiesFilter:
    """Compares the image's architecture, hypervisor type and VM mode with those that the host announces.

    As in Nova: one triple must have all properties of the image. An image without them runs anywhere; an image with
    them does not run on a host that announces nothing. Not here: hypervisor version, address bits.
    """

    name: ClassVar[str] = "ImagePropertiesFilter"
    run_on_rebuild: ClassVar[bool] = True

    def applies_to(self, spec: RequestSpec) -> bool:
        """Only to images with one of these properties."""
        return any(spec.image_properties.get(key) for key in PROPERTIES)

    def reads_image_property(self, name: str, membership: Membership) -> bool:
        """Whether hosts announce it."""
        return name in PROPERTIES

    def filter(self, view: HostsView, spec: RequestSpec) -> Verdict:
        """Hosts announce the same few lists, so each distinct one is compared once."""
        requested = [spec.image_properties.get(key, "").lower() for key in PROPERTIES]
        words = view.attribute(SUPPORTED)
        verdicts = {word: supports(word, requested) for word in set(words)}
        return verdict_of(np.array([verdicts[word] for word in words], dtype=np.bool_), "image.not_supported")


def supports(announced: str | None, requested: list[str]) -> bool:
    """Whether one of the announced triples has everything that is required (an empty string requires nothing)."""
    triples = [[word.strip().lower() for word in triple.split("/")] for triple in (announced or "").split(",")]
    return any(
        len(triple) == len(requested) and all(want in ("", have) for have, want in zip(triple, requested, strict=True))
        for triple in triples
    )
