"""The RPC server of topic `scheduler`, as Nova's own scheduler is one."""

from __future__ import annotations

from typing import Protocol

from scheduler_worker.nova.envelope import Call


class CallDispatcher(Protocol):
    """What answers calls. The server has checked method and version, and answers `ping` itself."""

    async def call(self, call: Call) -> object:
        """The result of a call as JSON values; of a cast nothing is done with it. Casts come one after the other.

        It may be cancelled (the client has given up), and called again with the same `unique_id` after any part of
        it was done. Raises RemoteFault, which the client raises then; NotDecided: the call is relayed to a stock
        nova-scheduler; Transient: it is called again until the client gives up. Any other exception is logged, and
        the client told that the call failed.
        """
