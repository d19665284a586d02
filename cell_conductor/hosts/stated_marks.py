"""What others state of the cell's database, and whether this conductor has heard enough of that to act."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

import structlog
from msgspec import Struct

from bus.clock import Clock, LogInterval
from bus.contracts.base import DatabaseMark
from cell_conductor.hosts.lease_table import LISTEN_HEARTBEATS, MAX_SERVICES, LeaseTable
from cell_conductor.hosts.service_state_publisher import SERVICE_STATES_INTERVAL_S
from cell_conductor.state.database_marks import Stated, is_behind
from cell_conductor.state.lease import DEFAULT_HEARTBEAT_S, LEADERSHIP_S, RENEW_LEADERSHIP_S
from cell_conductor.store.port import InstanceStore

log = structlog.get_logger(__name__)

ASK_AGAIN_S = 30.0  # while no scheduler answers what they have heard of the database
FARTHEST_INCARNATION = 1000  # no database is restored more often than this between two of its copies
# Recoveries that one service alone may begin while this process runs: it may be out of its mind.
MAX_RECOVERIES_BY_ONE = 10
# Who states a later incarnation was commanded by it: its conductor, if it lives, is heard within this, also where
# another one takes over.
RIVAL_S = LEADERSHIP_S + 2 * RENEW_LEADERSHIP_S + SERVICE_STATES_INTERVAL_S


class _Listening(Struct):
    """What is asked and heard of one database server."""

    server: int
    since: float  # when it began to listen (monotonic)
    ask_at: float = 0.0  # when placement and the schedulers are asked
    may_act: bool = False  # whether enough was heard


class StatedMarks:
    """What one conductor has heard. It acts once it has listened to the services that are up on record."""

    def __init__(self, table: LeaseTable, store: InstanceStore, clock: Clock) -> None:
        self._table = table
        self._store = store
        self._clock = clock
        self._unbelieved = LogInterval(clock)
        # By service ("": placement and the schedulers), where that is above what the database has.
        self._above: dict[str, DatabaseMark] = {}
        self._recoveries_by = Counter[str]()  # the recoveries that followed from each one's statement alone
        self._conductor = 0  # the incarnation that conductors go by
        self._listening: _Listening | None = None
        self._newer_since = math.inf  # since when a later incarnation is stated

    def listen(self) -> None:
        """From now on."""
        self._listening = _Listening(self._store.servers, self._clock.monotonic())

    def hear_conductor(self, mark: DatabaseMark) -> None:
        """A conductor of the cell goes by this one."""
        self._conductor = max(self._conductor, mark.database_incarnation)

    def stated(self) -> Stated:
        """What others state of the cell's database."""
        # A conductor that has just started, or whose database is on another server than before, listens first: its disk
        # may be an old one. A cell that never had a service has commanded nothing.
        now_s, table, listening = self._clock.monotonic(), self._table, self._listening
        if listening is not None and listening.server != self._store.servers:
            listening = self._listening = _Listening(self._store.servers, now_s)
            table.hear_anew()
            self._store.read_anew()
        is_newer = self._delete_recorded(now_s)
        listened_s = -1.0 if listening is None else now_s - listening.since
        is_known = table.is_listening and listened_s >= table.heartbeats_s and not self._above
        if listening is not None and is_known and self._store.is_read:
            listening.may_act = True
        # Also of a service that is not on record.
        listens_s = max(table.listening_s, table.heartbeats_s, LISTEN_HEARTBEATS * DEFAULT_HEARTBEAT_S)
        return Stated(
            marks=tuple(self._above.values()),
            conductor=self._conductor,
            is_known=listened_s >= listens_s and (not is_newer or now_s - self._newer_since >= RIVAL_S),
            is_whole=table.is_listening and not table.unheard,
            may_act=listening is not None and listening.may_act and not is_newer,
        )

    def _delete_recorded(self, now_s: float) -> bool:
        """Drop the marks that are on record by now. Whether one of those left is of a later incarnation."""
        recorded = self._store.recorded
        self._above = {by: mark for by, mark in self._above.items() if is_behind(recorded, mark)}
        own = self._store.incarnation
        is_newer = any(one.database_incarnation > own for one in self._above.values())
        self._newer_since = min(self._newer_since, now_s) if is_newer else math.inf
        return is_newer

    def marks_wanted_by(self) -> _Listening | None:
        """For whom the schedulers and placement are to be asked now, until they answer, for each server; None: not."""
        now_s, listening = self._clock.monotonic(), self._listening
        if listening is None or now_s < listening.ask_at:
            return None
        listening.ask_at = now_s + ASK_AGAIN_S
        return listening

    def hear_all(self, marks: Collection[DatabaseMark], listening: _Listening) -> None:
        """What the schedulers and placement have heard, asked for this one; none: they have not answered."""
        if marks:
            listening.ask_at = math.inf
        for mark in marks:
            self.hear(mark)

    def hear(self, mark: DatabaseMark, *, by: str = "") -> None:
        """A service states this of the cell's database; "": placement, or a scheduler. One that no database could have
        had, and one of a service on whose statement alone the cell has recovered again and again, counts for nothing.
        """
        if not is_behind(self._store.recorded, mark) or len(self._above) >= MAX_SERVICES:
            return
        own, incarnation = self._store.incarnation, mark.database_incarnation
        is_believed = incarnation <= own + FARTHEST_INCARNATION and self._recoveries_by[by] < MAX_RECOVERIES_BY_ONE
        if incarnation > own and (is_believed or self._unbelieved.count()):
            log.warning("service.incarnation", by=by, incarnation=incarnation, own=own, believed=is_believed)
        if is_believed:
            self._above[by] = self._above.get(by, mark).joined(mark)

    def record_recovery(self) -> None:
        """The cell recovers by what is stated now."""
        if len(self._above) == 1:
            self._recoveries_by.update(self._above.keys() - {""})
