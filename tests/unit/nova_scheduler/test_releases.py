"""What each release of Nova asks of hosts, and a setting that names another one than the API is of."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from bus.clock import SystemClock
from nova_scheduler.cloud.api_config import NovaApiConfig
from nova_scheduler.cloud.rest import NovaRest
from nova_scheduler.config import PrefilterSettings
from nova_scheduler.request.releases import MICROVERSIONS, NEWEST, check_release
from nova_scheduler.request.request_spec import NovaRequest
from nova_scheduler.request.resource_request import ResourceRequest, resource_request
from tests.unit.nova_scheduler.test_request_spec import Facts, image, request

TPM = {"hw:tpm_version": "2.0", "hw:tpm_model": "tpm-crb"}
UEFI = {"hw_firmware_type": "uefi", "hw_machine_type": "q35"}
SECRET = "COMPUTE_SECURITY_TPM_SECRET_SECURITY_USER"
# (request, {release: the traits that it requires}), each for the releases from there on
CASES: dict[str, tuple[NovaRequest, dict[int, set[str]]]] = {
    "a TPM": (
        request(TPM),
        {
            29: {"COMPUTE_SECURITY_TPM_2_0"},
            30: {"COMPUTE_SECURITY_TPM_2_0", "COMPUTE_SECURITY_TPM_CRB"},
            33: {"COMPUTE_SECURITY_TPM_2_0", "COMPUTE_SECURITY_TPM_CRB", SECRET},
        },
    ),
    "a TPM of the usual model": (
        request({"hw:tpm_version": "1.2"}),
        {
            29: {"COMPUTE_SECURITY_TPM_1_2"},
            30: {"COMPUTE_SECURITY_TPM_1_2", "COMPUTE_SECURITY_TPM_TIS"},
            33: {"COMPUTE_SECURITY_TPM_1_2", "COMPUTE_SECURITY_TPM_TIS", SECRET},
        },
    ),
    "firmware without state": (
        request(image=image(hw_firmware_stateless=True, **UEFI)),
        {29: set(), 30: {"COMPUTE_SECURITY_STATELESS_FIRMWARE"}},
    ),
    "sound": (request({"hw:sound_model": "virtio"}), {29: set(), 32: {"COMPUTE_SOUND_MODEL_VIRTIO"}}),
    "encrypted memory": (
        request({"hw:mem_encryption": "true"}, image=image(**UEFI)),
        {29: set(), 32: {"HW_CPU_X86_AMD_SEV"}},
    ),
    "a trait that the flavor requires itself": (
        request({"trait:HW_CPU_X86_AMD_SEV": "required"}),
        {29: {"HW_CPU_X86_AMD_SEV"}},
    ),
    "nothing": (request(), {29: set()}),
}


@pytest.mark.parametrize("release", MICROVERSIONS)
@pytest.mark.parametrize("case", CASES)
def test_what_a_release_requires(case: str, release: int) -> None:
    one, by_release = CASES[case]
    found = resource_request(one, PrefilterSettings(), Facts(), requires_owner=False, release=release)
    assert isinstance(found, ResourceRequest)
    required = {name for (name,) in (*found.query.required, *found.query.root_required)}
    assert required == by_release[max(since for since in by_release if since <= release)]
    assert ("MEM_ENCRYPTION_CONTEXT" in found.query.resources) == (case == "encrypted memory")


@pytest.mark.parametrize("security", ["none of them", "vault"])
def test_a_security_that_a_release_does_not_read_is_no_contradiction(security: str) -> None:
    one = request({**TPM, "hw:tpm_secret_security": security})
    found = resource_request(one, PrefilterSettings(), Facts(), requires_owner=False, release=32)
    assert isinstance(found, ResourceRequest)


@pytest.mark.parametrize(("release", "newest", "others"), [
    (34, (2, 104), None), (29, (2, 96), None), (31, (2, 100), None), (34, (2, 100), [31, 32]), (29, (2, 200), []),
])  # fmt: skip
def test_a_release_that_the_api_is_not_of(release: int, newest: tuple[int, int], others: list[int] | None) -> None:
    with capture_logs() as lines:
        check_release(release, newest)
    assert [line["releases"] for line in lines] == ([] if others is None else [others])


async def test_the_servers_newest_version_is_told_whatever_is_used() -> None:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"version": {"version": "2.200"}})

    told: list[Any] = []
    config = NovaApiConfig(url="http://nova.invalid/v2.1", token="t")
    transport = httpx.MockTransport(answer)
    api = NovaRest(config, clock=SystemClock(), transport=transport, setting="nova.api", on_version=told.append)
    assert await api.version() == await api.version() == MICROVERSIONS[NEWEST]
    assert told == [(2, 200)]
    await api.close()
