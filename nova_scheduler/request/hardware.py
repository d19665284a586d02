"""What a flavor's extra specs and an image's properties ask of the hardware (Nova 34, `nova/virt/hardware.py`).

Nova's API has refused contradictions before the scheduler is called. Where one comes all the same, Nova's scheduler
fails with an exception of its own; here it raises NotDecided, so that a stock nova-scheduler gives that answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from msgspec import Struct

from nova_scheduler.request.request_spec import NotDecided, NovaRequest
from nova_scheduler.wire.versioned import is_true

CONTRADICTION: Final = "contradiction"

MAX_CPUS = 8_192  # a mask of CPUs is written out up to this number
MAX_MASK = 255  # characters of it, as Nova's database bounds an extra spec

_CPU_POLICIES = ("dedicated", "shared", "mixed")
_MEMORY_ENCRYPTION_TRAITS: Final = {
    "amd-sev": "HW_CPU_X86_AMD_SEV",
    "amd-sev-es": "HW_CPU_X86_AMD_SEV_ES",
    "amd-sev-snp": "HW_CPU_X86_AMD_SEV_SNP",
    "intel-tdx": "HW_CPU_X86_INTEL_TDX",
}
_STATELESS = frozenset({"amd-sev-snp", "intel-tdx"})  # memory encryption that needs firmware without state


class Cpus(Struct, frozen=True):
    """What the CPU policy makes of a flavor's CPUs."""

    # pcpus, vcpus: None where the flavor's own number is meant as VCPU
    pcpus: int | None = None
    vcpus: int | None = None
    is_dedicated: bool = False
    # whether the trait of hyperthreads is required (True), forbidden (False) or not looked at
    hyperthreading: bool | None = None


def chosen(request: NovaRequest, key: str, allowed: Collection[str], prefix: str = "hw") -> str | None:
    """The value of an extra spec `prefix:key` or of the image property `prefix_key`. Raises NotDecided."""
    of_flavor, of_image = _of_both(request, key, prefix)
    if of_flavor and of_image and of_flavor != of_image:
        raise NotDecided(CONTRADICTION, f"{prefix}:{key} of the flavor and of the image differ")
    value = of_flavor or of_image
    if value is not None and value not in allowed:
        raise NotDecided(CONTRADICTION, f"{prefix}:{key} is none of {', '.join(allowed)}")
    return value


def flag(request: NovaRequest, key: str) -> bool:
    """Whether the flavor or the image asks for `hw:key`. Raises NotDecided."""
    of_flavor = request.flavor.extra_specs.get(f"hw:{key}")
    of_image = request.image_or_none.properties.get(f"hw_{key}")
    said = {is_true(one) for one in (of_flavor, of_image) if one is not None}
    if len(said) == 2:
        raise NotDecided(CONTRADICTION, f"hw:{key} of the flavor and of the image differ")
    return True in said


def cpus(request: NovaRequest) -> Cpus:
    """The CPUs to ask for by `hw:cpu_policy`, `hw:cpu_thread_policy` and what belongs to them. Raises NotDecided."""
    policy, total = _cpu_policy(request), request.flavor.vcpus
    hyperthreading = {"isolate": False, "require": True}.get(_cpu_thread_policy(request) or "")
    isolates = _emulator_threads_policy(request) == "isolate"
    if policy == "dedicated":
        return Cpus(total + isolates, None, True, hyperthreading)
    if policy == "mixed":
        pcpus = _dedicated_cpus(request)
        return Cpus(pcpus + isolates, total - pcpus, False, hyperthreading)
    return Cpus(hyperthreading=hyperthreading)


def memory_encryption_trait(request: NovaRequest) -> str | None:
    """The trait of the memory encryption asked for, if any. Raises NotDecided."""
    if not flag(request, "mem_encryption"):
        return None
    image = request.image_or_none
    model = chosen(request, "mem_encryption_model", _MEMORY_ENCRYPTION_TRAITS) or "amd-sev"
    machine_type = image.text("hw_machine_type")
    fits = image.text("hw_firmware_type") == "uefi" and (machine_type is None or "q35" in machine_type)
    if model in _STATELESS:
        fits = fits and stateless_firmware(request)
    if model == "intel-tdx":
        fits = fits and image.text("hw_video_model") == "none"
    if not fits:
        raise NotDecided(CONTRADICTION, f"the image's firmware, machine type or video device rules {model} out")
    return _MEMORY_ENCRYPTION_TRAITS[model]


def stateless_firmware(request: NovaRequest) -> bool:
    """Whether the image asks for firmware without state; it is ignored but for UEFI."""
    image = request.image_or_none
    return is_true(image.properties.get("hw_firmware_stateless")) and image.text("hw_firmware_type") == "uefi"


def tpm_traits(request: NovaRequest) -> tuple[str, ...]:
    """The traits of the virtual TPM asked for. Raises NotDecided."""
    version = chosen(request, "tpm_version", ("1.2", "2.0"))
    if version is None:
        return ()
    model = chosen(request, "tpm_model", ("tpm-tis", "tpm-crb"))
    if model == "tpm-crb" and version != "2.0":
        raise NotDecided(CONTRADICTION, "a TPM of model CRB is of version 2.0")
    of_model = "COMPUTE_SECURITY_TPM_CRB" if model == "tpm-crb" else "COMPUTE_SECURITY_TPM_TIS"
    return of_model, "COMPUTE_SECURITY_TPM_2_0" if version == "2.0" else "COMPUTE_SECURITY_TPM_1_2"


def persistent_memory(request: NovaRequest) -> dict[str, int]:
    """{resource class: amount} of the labels of `hw:pmem`."""
    amounts: dict[str, int] = {}
    for label in request.flavor.extra_specs.get("hw:pmem", "").split(","):
        if label.strip():
            name = normalized("PMEM_NAMESPACE_" + label.strip())
            amounts[name] = amounts.get(name, 0) + 1
    return amounts


def normalized(name: str) -> str:
    """A name as a custom resource class: upper case, with _ for all but letters and digits (os-resource-classes)."""
    return "CUSTOM_" + re.sub("[^0-9A-Za-z]+", "_", name).upper()


def _of_both(request: NovaRequest, key: str, prefix: str = "hw") -> tuple[str | None, str | None]:
    return request.flavor.extra_specs.get(f"{prefix}:{key}"), request.image_or_none.text(f"{prefix}_{key}")


def _cpu_policy(request: NovaRequest) -> str | None:
    """The flavor's policy, else the image's. An image may not pin CPUs that the flavor shares; a flavor may pin those
    that the image shares.
    """
    of_flavor, of_image = _of_both(request, "cpu_policy")
    if not {of_flavor, of_image} <= {None, "", *_CPU_POLICIES}:
        raise NotDecided(CONTRADICTION, "the CPU policy is unknown")
    if of_image in {"mixed": {"dedicated"}, "shared": {"mixed", "dedicated"}}.get(of_flavor or "", ()):
        raise NotDecided(CONTRADICTION, "the image pins CPUs that the flavor shares")
    return of_flavor or of_image


def _cpu_thread_policy(request: NovaRequest) -> str | None:
    of_flavor, of_image = _of_both(request, "cpu_thread_policy")
    if not {of_flavor, of_image} <= {None, "", "prefer", "isolate", "require"}:
        raise NotDecided(CONTRADICTION, "the CPU thread policy is unknown")
    if of_flavor in {None, "prefer"}:
        return of_flavor or of_image
    if of_image and of_image != of_flavor:
        raise NotDecided(CONTRADICTION, "the CPU thread policies of flavor and image differ")
    return of_flavor


def _emulator_threads_policy(request: NovaRequest) -> str | None:
    policy = request.flavor.extra_specs.get("hw:emulator_threads_policy")
    if policy and policy not in {"share", "isolate"}:
        raise NotDecided(CONTRADICTION, "the policy of emulator threads is unknown")
    return policy or None


def _dedicated_cpus(request: NovaRequest) -> int:
    """How many CPUs of a mixed instance are dedicated: those of its mask, else the real-time ones."""
    specs, total = request.flavor.extra_specs, request.flavor.vcpus
    mask = specs.get("hw:cpu_dedicated_mask")
    if mask:
        dedicated = _masked(mask, total)
        if not 0 < len(dedicated) < total or max(dedicated) >= total:
            raise NotDecided(CONTRADICTION, "the mask of dedicated CPUs is none, all, or beyond the flavor's")
        return len(dedicated)
    if not is_true(specs.get("hw:cpu_realtime")):
        return 0
    of_flavor, of_image = _of_both(request, "cpu_realtime_mask")
    mask = of_image or of_flavor
    realtime = _masked(mask, total) if mask else set(range(min(total, MAX_CPUS)))
    is_all = len(realtime) == total
    if not realtime or max(realtime) >= total or (is_all and not _emulator_threads_policy(request)):
        raise NotDecided(CONTRADICTION, "the mask of real-time CPUs is none, all, or beyond the flavor's")
    return len(realtime)


def _masked(mask: str, total: int) -> set[int]:
    """The CPUs of a mask such as `1-4,^3,6`; one that begins with ^ takes CPUs away from all."""
    if total > MAX_CPUS or len(mask) > MAX_MASK:
        raise NotDecided(CONTRADICTION, f"a mask of more than {MAX_CPUS} CPUs, or {MAX_MASK} characters")
    named, excluded = set[int](), set[int]()
    whole = f"0-{total - 1},{mask}" if mask.strip().startswith("^") else mask
    for rule in (part.strip() for part in whole.split(",")):
        if not rule:
            continue
        first, _, last = rule.removeprefix("^").partition("-")
        try:
            start, end = int(first), int(last or first)
        except ValueError:
            raise NotDecided(CONTRADICTION, "the mask of CPUs cannot be read") from None
        if not 0 <= start <= end < MAX_CPUS:
            raise NotDecided(CONTRADICTION, "the mask of CPUs has a wrong range")
        (excluded if rule.startswith("^") else named).update(range(start, end + 1))
    return named - excluded
