"""What moves no generation must not be missed by a copy that says it is equal."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from bus.clock import new_uuid
from placement_worker.rest.copying import CopySource
from placement_worker.store.image import ImageError
from tests.integration.placement_rest.conftest import Placement

pytestmark = pytest.mark.postgres


@pytest.fixture
async def source(placement: Placement) -> AsyncIterator[CopySource]:
    made = CopySource(placement.base_url, "admin")
    yield made
    await made.close()


async def test_a_consumer_that_was_removed_and_made_again_is_seen(placement: Placement, source: CopySource) -> None:
    host = await placement.host(VCPU=8)
    consumer = new_uuid(placement.rng)
    assert (await placement.claim(consumer, host, VCPU=1)).status_code == 204
    before = (await source.read()).consumers[consumer]
    await placement.call("DELETE", f"/allocations/{consumer}", status=204)
    assert (await placement.claim(consumer, host, VCPU=3)).status_code == 204
    after = (await source.read(whole=False)).consumers[consumer]
    assert (before.generation, after.generation) == (1, 1)
    assert after.holding == {host: {"VCPU": 3}}


async def test_aggregates_of_the_old_days_are_seen_by_a_whole_pass(placement: Placement, source: CopySource) -> None:
    host, aggregate = await placement.host(VCPU=8), new_uuid(placement.rng)
    await source.read()
    path = f"/resource_providers/{host}/aggregates"
    answer = await placement.client.put(
        path, json=[aggregate], headers={"x-auth-token": "admin", "openstack-api-version": "placement 1.18"}
    )
    assert answer.status_code == 200
    assert (await source.read(whole=True)).providers[host].aggregates == (aggregate,)


async def test_nobody_there_and_nobody_we_know(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement_worker.rest.copying.PAUSE_S", 0.001)
    nobody = CopySource("http://127.0.0.1:9", "admin")
    with pytest.raises(ImageError, match="ConnectError"):
        await nobody.read()
    await nobody.close()
    stranger = CopySource(f"{placement.base_url}/resource_providers", "")
    with pytest.raises(ImageError):
        await stranger.read()
    await stranger.close()
    with pytest.raises((ImageError, httpx.HTTPError)):
        await CopySource("gopher://x", "").read()
