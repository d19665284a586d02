"""The invariants that are looked at after every step that can change them, cheaply."""

from __future__ import annotations

from bus.contracts.base import tag_of
from bus.contracts.build import BuildEvent, BuildState
from bus.contracts.catalogue import DEAD, EVENTS, MESSAGES, Where
from placement_worker.domain.values import Provider
from placement_worker.store.memory import MemoryBookTable

# What belongs to the API bus alone.
ABOVE = frozenset(tag_of(row.message) for row in MESSAGES if row.where is Where.API)


class Breach(Exception):
    """An invariant does not hold."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name
        self.detail = detail


class BookWatch:
    """Looks at the book after each of its commits: only at what the commit touched."""

    def __init__(self, table: MemoryBookTable) -> None:
        self._table = table
        self._seen: dict[str, Provider] = {}
        self._versions: dict[tuple[str, str], int] = {}
        self._head = 0

    def __call__(self) -> None:
        """Raises Breach."""
        table = self._table
        for uuid, provider in table.providers.items():
            before = self._seen.get(uuid)
            if provider is before:
                continue
            self._usage(provider, before)
            if before is not None and provider.generation <= before.generation:
                raise Breach("generations_rise", f"{uuid}: {provider.generation} after {before.generation}")
            self._seen[uuid] = provider
        for uuid in [uuid for uuid in self._seen if uuid not in table.providers]:
            del self._seen[uuid]
        for key, source in table.sources.items():
            if source.version < self._versions.get(key, 0):
                raise Breach("stale_never_applied", f"{key}: {source.version} after {self._versions[key]}")
            self._versions[key] = source.version
        if table.head < self._head:
            raise Breach("feed_has_no_hole", f"the head went from {self._head} to {table.head}")
        new = [change.sequence for change in table.changes if change.sequence > self._head]
        if new != list(range(self._head + 1, table.head + 1)):
            raise Breach("feed_has_no_hole", f"numbers {new[:5]}... after {self._head}, head {table.head}")
        self._head = table.head

    @staticmethod
    def _usage(provider: Provider, before: Provider | None) -> None:
        for name, used in provider.used.items():
            stock = provider.stocks.get(name)
            capacity = 0 if stock is None else stock.capacity
            risen = before is None or used > before.used.get(name, 0)
            if used < 0 or (used > capacity and risen):
                raise Breach("capacity", f"{provider.name} {name}: {used} of {capacity}")


class Listener:
    """Hears every message as a client would that misses none: terminal events, and who says what on which bus."""

    def __init__(self) -> None:
        self.events: dict[tuple[str, int], BuildEvent] = {}
        self.terminals: dict[str, dict[int, BuildState]] = {}
        self.accepted: dict[str, None] = {}
        self.upward: list[str] = []
        self.dead: list[str] = []

    def event(self, event: BuildEvent) -> None:
        """One event on the API bus."""
        self.events.setdefault((event.instance_uuid, event.sequence), event)
        if event.state is BuildState.ACCEPTED:
            self.accepted[event.instance_uuid] = None
        if not event.terminal or event.state is BuildState.DELETED:
            return
        said = self.terminals.setdefault(event.instance_uuid, {})
        known = said.get(event.sequence)
        if known is not None and known is not event.state:
            raise Breach("one_terminal_state", f"{event.instance_uuid}: number {event.sequence} twice, differently")
        said[event.sequence] = event.state
        if len(said) > 1:
            raise Breach("one_terminal_state", f"{event.instance_uuid}: terminal events {sorted(said.items())}")

    def message(self, bus: str, exchange: str, key: str, tag: str) -> None:
        """Any message: one that belongs above must not be said on a cell's bus."""
        if exchange == DEAD:
            self.dead.append(f"{bus} {key} {tag}")
        elif bus != "api" and tag in ABOVE and exchange != EVENTS:
            self.upward.append(f"{tag} on the bus of {bus}")
