"""A front that takes calls and never answers: `victim.py URL`. It prints when it is ready, and the ids of calls."""

from __future__ import annotations

import asyncio
import sys

from nova_scheduler.wire.envelope import Call
from tests.integration.nova_scheduler.world import Instructed, front


async def never(call: Call) -> object:
    sys.stdout.write(f"{call.unique_id}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()
    return None


async def main() -> None:
    async with front(sys.argv[1], Instructed(never), name="victim"):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
