"""What a request for several machines may name, and for how many it may be."""

from __future__ import annotations

from typing import Any

import pytest

from bus.contracts.build import MAX_MEMBERS, BuildRequest, FlavorCount
from bus.contracts.deploy import NetworkRequest, VolumeRequest

UUID = "10000000-0000-4000-8000-000000000001"
ONE_MORE = (FlavorCount(flavor="l"),)
VOLUMES, PORTS = (VolumeRequest(volume_id="v"),), (NetworkRequest(port=UUID),)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, None),
        ({"volumes": VOLUMES, "networks": PORTS}, None),
        ({"volumes": VOLUMES, "networks": PORTS, "min_count": 1}, None),
        ({"count": MAX_MEMBERS}, None),
        ({"count": MAX_MEMBERS, "also": ONE_MORE}, "at most"),
        ({"min_count": 2}, "min_count"),
        ({"count": 2, "min_count": 2}, None),
        ({"count": 2, "min_count": 3}, "min_count"),
        ({"count": 2, "volumes": VOLUMES}, "volume"),
        ({"count": 2, "networks": PORTS}, "port"),
        ({"also": ONE_MORE, "volumes": VOLUMES}, "volume"),
    ],
)
def test_a_request_for_several_machines_names_nothing_that_is_one_machines(
    fields: dict[str, Any], said: str | None
) -> None:
    if said is None:
        assert BuildRequest(instance_uuid=UUID, project_id="p", flavor="s", **fields).members >= 1
    else:
        with pytest.raises(ValueError, match=said):
            BuildRequest(instance_uuid=UUID, project_id="p", flavor="s", **fields)
