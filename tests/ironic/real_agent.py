"""The played agent on a real Ironic: whatever is lost between them, a node is cleaned and deployed in the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from bus.clock import new_uuid
from lab.ironic.laboratory import Lab, Nodes, lab
from tests.kit.real_metal import RNG, WAIT_S


class Lossy(httpx.AsyncBaseTransport):
    """A way to Ironic with planned faults: {path: what becomes of its next requests}.

    lost: Ironic takes it, and its answer does not arrive. failed: Ironic takes it, and answers 500, as when SQLite
    locks after the token is saved. refused: Ironic answers 400 because no conductor is there just now.
    """

    def __init__(self) -> None:
        self._inner = httpx.AsyncHTTPTransport()
        self.plan: dict[str, list[str]] = {}

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        planned = self.plan.get(request.url.path.split("/")[2], [])
        fault = planned.pop(0) if planned else ""
        if fault == "refused":
            return httpx.Response(400, json={"error_message": {"faultstring": "No valid host was found."}})
        answer = await self._inner.handle_async_request(request)
        if not fault:
            return answer
        await answer.aread()
        if fault == "lost":
            raise httpx.ReadTimeout("lost")
        return httpx.Response(500, json={"error_message": {"faultstring": "database is locked"}})

    async def aclose(self) -> None:
        await self._inner.aclose()


WAY = Lossy()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here() -> AsyncIterator[Lab]:
    async with lab(agents_way=WAY) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def nodes(here: Lab) -> AsyncIterator[Nodes]:
    operator = Nodes(here.ironic.url)
    yield operator
    await operator.close()


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def deploy(here: Lab, nodes: Nodes, node: str) -> None:
    info: dict[str, Any] = {
        "image_source": here.agents.image_url,
        "image_os_hash_algo": "sha256",
        "image_os_hash_value": here.agents.image_sha256,
        "image_type": "whole-disk",
    }
    wanted = [{"op": "add", "path": f"/instance_info/{name}", "value": value} for name, value in info.items()]
    await nodes.patch(node, {"op": "add", "path": "/instance_uuid", "value": new_uuid(RNG)}, *wanted)
    await nodes.provision(node, "active")


@pytest.mark.parametrize("fault", ["lost", "failed"])
async def test_a_token_that_never_arrived_costs_a_restart(here: Lab, nodes: Nodes, fault: str) -> None:
    WAY.plan["lookup"] = [fault]
    before = here.agents.restarts
    (node,) = await nodes.enroll(1, direct=True)  # cleaned first
    cleaned = here.agents.restarts
    assert cleaned > before and not WAY.plan["lookup"]
    WAY.plan["lookup"] = [fault]
    await deploy(here, nodes, node)
    await nodes.until(node, "active", timeout_s=WAIT_S)
    assert here.agents.restarts > cleaned and not WAY.plan["lookup"]


async def test_a_token_is_kept_when_a_beat_is_refused_for_another_reason(here: Lab, nodes: Nodes) -> None:
    """It was dropped at each 400, and Ironic gives no second one."""
    WAY.plan["heartbeat"] = ["refused", "lost", "failed", "refused"]
    before = here.agents.restarts
    (node,) = await nodes.enroll(1, direct=True)
    WAY.plan["heartbeat"] += ["refused", "refused"]
    await deploy(here, nodes, node)
    await nodes.until(node, "active", timeout_s=WAIT_S)
    assert here.agents.restarts == before and not WAY.plan["heartbeat"]


async def test_an_agent_that_missed_the_end_of_a_boot_signs_in_again(here: Lab, nodes: Nodes) -> None:
    (node,) = await nodes.enroll(1, direct=True)
    here.agents.silent.add(node)
    await deploy(here, nodes, node)
    await nodes.until(node, "wait call-back", timeout_s=WAIT_S)
    here.agents.tokens[node] = old = "of the boot before, whose end the agent did not see"
    here.agents.silent.discard(node)
    await nodes.until(node, "active", timeout_s=WAIT_S)
    assert here.agents.tokens.get(node) != old, "it has signed in for a new one"
