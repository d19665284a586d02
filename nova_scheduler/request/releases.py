"""What differs between releases of Nova in what their schedulers ask of hosts, and how their APIs tell them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import structlog

log = structlog.get_logger("nova")

NEWEST: Final = 34
# The release since which Nova itself requires a trait, for what flavor and image ask in other words.
SINCE: Final[Mapping[str, int]] = {
    "OWNER_NOVA": 34,
    "HW_CPU_X86_AMD_SEV_SNP": 34,
    "HW_CPU_X86_INTEL_TDX": 34,
    "COMPUTE_SECURITY_TPM_SECRET_SECURITY_USER": 33,
    "COMPUTE_SECURITY_TPM_SECRET_SECURITY_HOST": 33,
    "COMPUTE_SECURITY_TPM_SECRET_SECURITY_DEPLOYMENT": 33,
    "COMPUTE_SOUND_MODEL_VIRTIO": 32,
    "HW_CPU_X86_AMD_SEV": 32,
    "HW_CPU_X86_AMD_SEV_ES": 32,
    "COMPUTE_SECURITY_TPM_TIS": 30,
    "COMPUTE_SECURITY_TPM_CRB": 30,
    "COMPUTE_SECURITY_STATELESS_FIRMWARE": 30,
}
# The newest microversion of each release's API.
MICROVERSIONS: Final[Mapping[int, tuple[int, int]]] = {
    29: (2, 96),
    30: (2, 96),
    31: (2, 100),
    32: (2, 100),
    33: (2, 103),
    34: (2, 104),
}


def of_release(traits: Iterable[str], release: int) -> list[str]:
    """Those that this release requires."""
    return [one for one in traits if SINCE.get(one, 0) <= release]


def check_release(release: int, microversion: tuple[int, int]) -> None:
    """Log that the release of the settings is not that of an API. microversion: the API's newest."""
    if MICROVERSIONS[release] != microversion:
        found = [number for number, newest in MICROVERSIONS.items() if newest == microversion]
        said = ".".join(map(str, microversion))
        log.warning("nova.release_differs", release=release, microversion=said, releases=found)
