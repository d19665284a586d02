"""The databases of the simulated world: a statement's latency and faults, and servers that die and come back."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable

from bus.faults import DatabaseUnavailable, Transient
from bus.persistence.memory_database import MemoryDatabase, MemorySession
from lab.simulation.event_log import EventLog
from lab.simulation.loop import NO_CONTEXT, PROCESS
from lab.simulation.network import NetworkFaults, SimTransport

STATEMENT_S = 0.0005
MAX_DOWNTIME_S = 2.0  # a server that died by itself is back by then


class SimDatabases:
    """tables: by schema. sessions: those of all processes that run."""

    def __init__(
        self,
        tables: dict[str, MemoryDatabase],
        network_faults: NetworkFaults,
        event_log: EventLog,
        sessions: Callable[[], Iterable[MemorySession]],
    ) -> None:
        self.tables = tables
        self.unavailable: dict[str, int] = {}  # schemas that cannot be reached, and how many faults cause it
        self._network_faults = network_faults
        self._event_log = event_log
        self._sessions = sessions

    async def pause(self, schema: str, rng: random.Random, transports: list[SimTransport], point: str) -> None:
        """One statement of one process: its latency, and what may go wrong with it."""
        slow_s = max((transport.slow_s for transport in transports), default=0.0)
        await asyncio.sleep(STATEMENT_S * (0.5 + rng.random()) + slow_s)
        process = PROCESS.get()
        if process is not None:
            await self._network_faults.maybe_crash(process.name)
        if self.unavailable.get(schema):
            raise DatabaseUnavailable(f"{schema} is away")
        rates, strikes = self._network_faults.rates, self._network_faults.strikes
        if strikes(rates.store_crash):
            seconds = self._network_faults.between(0.05, MAX_DOWNTIME_S)
            asyncio.get_running_loop().call_soon(self._fall_briefly, schema, seconds, context=NO_CONTEXT)
            await asyncio.sleep(0)  # by then its sessions are cut
            raise DatabaseUnavailable(f"{schema} has died")
        if point == "statement":
            if strikes(rates.conflict):
                self._hit(schema, "conflict")
                raise Transient("could not serialize access", code="database.serialization")
            if strikes(rates.store_lost):
                self._hit(schema, "lost")
                raise DatabaseUnavailable("the connection was lost")
        elif strikes(rates.commit_lost_before if point == "commit" else rates.commit_lost_after):
            self._hit(schema, f"lost {'before' if point == 'commit' else 'after'} commit")
            raise DatabaseUnavailable(f"the connection was lost at the {point}")

    def fall(self, schema: str) -> Callable[[], None]:
        """A server dies: sessions are cut, what is not on its disk is lost. Back when the result is called."""
        table = self.tables[schema]
        for session in self._sessions():
            if session.database is table:
                session.disconnect()
        before = table.taken_back
        table.crash()
        if table.taken_back != before:
            self._event_log.record("forgot", f"{schema} {table.taken_back - before} commits")
        self.unavailable[schema] = self.unavailable.get(schema, 0) + 1

        def up() -> None:
            self.unavailable[schema] -= 1

        return up

    def _fall_briefly(self, schema: str, seconds: float) -> None:
        self._hit(schema, "died")
        asyncio.get_running_loop().call_later(seconds, self.fall(schema), context=NO_CONTEXT)

    def _hit(self, schema: str, what: str) -> None:
        process = PROCESS.get()
        self._event_log.record("store", f"{schema} {process.name if process else ''} {what}")
