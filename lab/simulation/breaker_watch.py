"""The rules of a breaker: too many losses of one compute service wait for an operator's word.

Judged from what conductors commit and from what the operator reset; not from what a conductor counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from cell_conductor.state.breaker import Breaker
from cell_conductor.state.instance import Instance, State
from cell_conductor.store.memory import MemoryInstanceTable
from lab.simulation.plan import FaultType, Plan
from lab.simulation.watch import Breach

# Losses of one service that are committed within this count together (`breaker_window_s`). Each conductor counts for
# itself, and a cell has at most two.
WINDOW_S, CONDUCTORS = 1.0, 2
# A conductor that had judged its report when another one tripped the breaker may commit this much later.
RACE_S = 5.0
LOST = "instance.lost"


class BreakerWatch:
    """Looks at every commit of a cell, when the plan has a limit."""

    def __init__(self, plan: Plan, now: Callable[[], float]) -> None:
        self._limit = plan.breaker_limit
        self._races = any(fault.kind in (FaultType.PAUSE, FaultType.SLOW) for fault in plan.fault_events)
        self._now = now
        self._seen: dict[str, Instance] = {}
        self._losses: dict[str, list[float]] = {}  # of each service, when they were committed
        self._opened: dict[str, float] = {}
        self._cell_of: dict[str, MemoryInstanceTable] = {}  # the database in which a breaker opened
        self._passed: set[tuple[str, str]] = set()  # (service, machine) that an operator has allowed
        self._recovered: dict[tuple[str, int], int] = {}  # losses of each recovery, by database and incarnation

    def go(self, breaker: Breaker) -> None:
        """An operator allows the machines that tripped it."""
        self._passed.update((breaker.service, machine) for machine in breaker.machines)

    def committed(self, table: MemoryInstanceTable, exempt: Collection[str]) -> None:
        """After a commit of a cell's conductor. Raises Breach."""
        if not self._limit:
            return
        self._note_open(table)
        for uuid, instance in table.instances.items():
            before = self._seen.get(uuid)
            if before is instance:
                continue
            self._seen[uuid] = instance
            is_new_loss = before is not None and before.state is State.ACTIVE and instance.code == LOST
            if not is_new_loss or uuid in exempt or instance.host_uuid is None:
                continue
            if table.recovers:
                self._lost_by_recovery(table)
            else:
                self._lost(instance, f"{uuid}@{instance.host_uuid}")

    def _note_open(self, table: MemoryInstanceTable) -> None:
        for service, breaker in table.breakers.items():
            if breaker.is_open:
                self._opened.setdefault(service, self._now())
                self._cell_of[service] = table
            else:
                self._opened.pop(service, None)
        for service in [one for one in self._opened if self._cell_of[one] is table and one not in table.breakers]:
            del self._opened[service]  # the cell's database was set back to before it opened: seed 81373

    def _lost_by_recovery(self, table: MemoryInstanceTable) -> None:
        of = table.database_id, table.incarnation
        count = self._recovered[of] = self._recovered.get(of, 0) + 1
        if count > max(self._limit, table.losses.count if table.accepts else 0):
            raise Breach("breaker_holds", f"a recovery ends {count} instances without a word")

    def _lost(self, instance: Instance, machine: str) -> None:
        service, now = instance.current.service, self._now()
        if (service, machine) in self._passed:
            return
        opened = self._opened.get(service)
        if opened is not None and not self._races and now - opened > RACE_S:
            raise Breach("breaker_holds", f"{machine} is lost; the breaker of {service} is open since {opened:.1f}")
        recent = [at for at in self._losses.get(service, []) if now - at <= WINDOW_S]
        self._losses[service] = [*recent, now]
        if len(recent) + 1 > CONDUCTORS * self._limit:
            raise Breach("breaker_holds", f"{len(recent) + 1} machines of {service} are lost at once, without a word")
