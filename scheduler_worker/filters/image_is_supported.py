"""Does the host support the image's architecture, hypervisor and VM mode?"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from scheduler_worker.domain.plugins import Verdict, verdict_of
from scheduler_worker.domain.request_spec import RequestSpec
from scheduler_worker.domain.view import HostsView, Membership

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
