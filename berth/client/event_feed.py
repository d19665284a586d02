"""Follows a stream of server-sent events, over as many connections as it takes. Pure: the clients read and wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from berth.client.answers import decoded
from berth.client.call import Feed
from berth.client.faults import ApiAnswerInvalid, ApiProblem, ApiUnavailable
from bus.contracts.build import OFF_RECORD, BuildEvent, BuildRecord
from bus.faults import Fault

# The largest event is a build with its timeline.
MAX_EVENT_BYTES = 4 * 1024 * 1024
# Connections in a row that brought no event.
MAX_TRIES = 10
FIRST_DELAY_S, MAX_DELAY_S = 0.5, 15.0
# Refusals that pass; any other lasts.
_PASSING = (408, 429, 502, 503, 504)
# Ends of a stream that the next connection does not have.
_ENDED_BY_PERMISSION = ("auth.", "role.", "project.")


class Reconnected(Struct, frozen=True):
    """The stream was cut and goes on: events in between are lost, so that what is shown has to be read anew."""


class _Lagged(Struct, frozen=True):
    code: str


class EventParser:
    """Server-sent events of one connection: (name, data) of each, without comments."""

    def __init__(self) -> None:
        self._waiting = bytearray()

    def take(self, piece: bytes) -> Iterator[tuple[str, bytes]]:
        """The events that are whole now. Raises ApiAnswerInvalid for one that is too long."""
        self._waiting += piece
        *whole, rest = self._waiting.split(b"\n\n")
        if max(map(len, (*whole, rest))) > MAX_EVENT_BYTES:
            raise ApiAnswerInvalid(f"an event of more than {MAX_EVENT_BYTES} bytes", code="api.answer_too_large")
        self._waiting = bytearray(rest)
        for one in whole:
            fields = dict(line.split(b": ", 1) for line in bytes(one).split(b"\n") if b": " in line[1:])
            if b"data" in fields:
                yield fields.get(b"event", b"message").decode("ascii", "replace"), fields[b"data"]


class Following:
    """The state of one feed: what has come, whether it has ended, when to connect again."""

    def __init__(self, feed: Feed[Any]) -> None:
        self._feed = feed
        self._highest = OFF_RECORD
        self._tries = 0
        self._connections = 0
        self._code = ""
        self.ended = False

    def connected(self) -> list[Any]:
        """A connection is made: what there is to say of it."""
        self._parser = EventParser()
        self._connections += 1
        return [Reconnected()] if self._connections > 1 and not self._feed.one_build else []

    def take(self, piece: bytes) -> Iterator[Any]:
        """What a part of the stream says. Raises ApiAnswerInvalid, ApiProblem."""
        for name, data in self._parser.take(piece):
            match name:
                case "build":
                    record = decoded(data, BuildRecord)
                    self._note(record.state)
                    yield record
                case "event":
                    event = decoded(data, BuildEvent)
                    if self._is_new(event):
                        self._note(event.state if event.terminal and event.sequence != OFF_RECORD else "")
                        yield event
                case "lagged":
                    self._lag(decoded(data, _Lagged).code)
            if self.ended:
                return

    def delay_s(self, fault: Fault | None) -> float:
        """How long to wait before the next connection. fault: the end of the last one; None: the server ended it.

        Raises it when nothing was ever connected, or when it lasts; ApiUnavailable when no connection brings anything.
        """
        problem = fault if isinstance(fault, ApiProblem) else None
        if fault is not None and (not self._connections or (problem is not None and problem.status not in _PASSING)):
            raise fault
        self._tries += 1
        if self._tries > MAX_TRIES:
            raise fault or ApiUnavailable(f"the stream was cut {MAX_TRIES} times in a row {self._code}".rstrip())
        asked = problem.retry_after_s if problem is not None and problem.retry_after_s is not None else 0.0
        return max(asked, 0.0 if self._tries == 1 else min(FIRST_DELAY_S * 2.0 ** (self._tries - 2), MAX_DELAY_S))

    def _note(self, state: str) -> None:
        self._tries = 0
        self.ended = state in self._feed.ends

    def _is_new(self, event: BuildEvent) -> bool:
        if not self._feed.one_build or event.sequence == OFF_RECORD:
            return True
        # `deleted` is the last state whatever its number: a cell whose database has crashed may number anew.
        is_new = event.sequence > self._highest or event.state in self._feed.ends
        self._highest = max(self._highest, event.sequence)
        return is_new

    def _lag(self, code: str) -> None:
        if code.startswith(_ENDED_BY_PERMISSION):
            raise ApiProblem(401 if code.startswith("auth.") else 403, code, "the token has other permissions now")
        self._code = f"({code[:64]})"
