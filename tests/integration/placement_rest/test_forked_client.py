"""A client that forks after it has read the version document: nova-scheduler with two workers after a restart."""

from __future__ import annotations

import asyncio
import sys

from tests.integration.placement_rest.conftest import PATIENCE_S, Placement

# Its two workers share what their parent has left open; an answer that is another's, or none, is a failure.
CLIENT = """
import os, sys
import httpx
url, token, *providers = sys.argv[1:]
client = httpx.Client(base_url=url, headers={"x-auth-token": token}, trust_env=False, timeout=10.0)
assert client.get("/").status_code == 200
workers = []
for provider in providers:
    pid = os.fork()
    if pid == 0:
        found = [client.get(f"/resource_providers/{provider}").json().get("uuid") for _ in range(50)]
        os._exit(0 if set(found) == {provider} else 1)
    workers.append(pid)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in workers))
"""


async def test_workers_that_are_forked_after_discovery_share_no_connection(placement: Placement) -> None:
    providers = [await placement.host(VCPU=4) for _ in range(2)]
    async with asyncio.timeout(PATIENCE_S):
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CLIENT, placement.base_url, "admin", *providers
        )
        assert await client.wait() == 0
