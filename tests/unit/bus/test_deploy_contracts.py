"""The requests that a client may send about a deployed machine: its bounds, and that secrets are not shown."""

from __future__ import annotations

import msgspec
import pytest

from bus.contracts.build import BuildRequest
from bus.contracts.deploy import MAX_NETWORK_DATA, MAX_USER_DATA, ConfigDrive
from scheduler_worker.config import Flavor, SchedulerConfig
from scheduler_worker.domain.decision_messages import instance_spec

UUID = "20000000-0000-4000-8000-000000000000"


def parsed(**fields: object) -> BuildRequest:
    return msgspec.convert(
        {"type": "build.request.v1", "instance_uuid": UUID, "flavor": "f", "project_id": "p"} | fields, BuildRequest
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"image_source": {"source": ""}},
        {"image_source": {"source": "http://a b"}},
        {"image_source": {"source": "http://a\n"}},
        {"image_source": {"source": "http://a", "hash_algorithm": "sha256"}},
        {"image_source": {"source": "http://a", "hash_value": "0" * 64}},
        {"image_source": {"source": "http://a", "hash_algorithm": "crc", "hash_value": "0" * 64}},
        {"image_source": {"source": "http://a", "format": "raw"}},
        {"config_drive": {"user_data": "x" * (MAX_USER_DATA + 1)}},
        {"config_drive": {"public_keys": ["k"] * 17}},
        {"config_drive": {"network_data": {"x": "y" * MAX_NETWORK_DATA}}},
        {"config_drive": {"hostname": "a b"}},
        {"networks": [{}]},
        {"networks": [{"port": UUID, "network": UUID}]},
        {"networks": [{"port": UUID}] * 17},
    ],
)
def test_what_is_malformed_or_too_large_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        parsed(**fields)


def test_what_may_be_secret_is_not_in_a_representation() -> None:
    request = parsed(config_drive={"user_data": "password: hunter2", "public_keys": ["ssh-ed25519 AAAA"]})
    assert "hunter2" not in repr(request) and "AAAA" not in repr(request)


def test_the_cell_gets_what_the_request_and_its_flavor_state_of_the_machine() -> None:
    request = parsed(
        image_source={"source": "http://a"}, config_drive={"user_data": "u"}, networks=[{"port": UUID}], name="n"
    )
    specs = {
        "trait:CUSTOM_RAID": "required",
        "trait:CUSTOM_OLD": "forbidden",
        "trait1:CUSTOM_NIC": "required",
        "capabilities:boot_mode": "uefi",
        "resources:CUSTOM_GOLD": "1",
    }
    spec = instance_spec(request, SchedulerConfig(flavors={request.flavor: Flavor(disk_gb=50, extra_specs=specs)}))
    assert spec.image_source == request.image_source and spec.networks == request.networks
    assert spec.config_drive == ConfigDrive(user_data="u")
    assert (spec.root_gb, spec.traits, spec.capabilities) == (50, ("CUSTOM_RAID",), {"boot_mode": "uefi"})
