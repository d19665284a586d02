"""What is on record of every request: its digest, its numbers, its timeline. Pure."""

from __future__ import annotations

from hashlib import blake2b

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from bus.contracts.actions import ActionEvent, ActionRequest
from bus.contracts.build import AttemptRecord, BuildEvent, BuildRequest, TimelineEntry

DIGEST_BYTES = 16

_encode = msgspec.json.Encoder(order="deterministic").encode


def digest_of(request: BuildRequest | ActionRequest) -> bytes:
    """Of its whole content but who asked, which distinguishes a repeated request from a clash."""
    asked = replace(request, by="") if request.by else request
    return blake2b(_encode(asked), digest_size=DIGEST_BYTES).digest()


class RecordedRequest(Struct, frozen=True, kw_only=True):
    """What is on record of every request."""

    instance_uuid: str
    project_id: str
    # of its whole content, which distinguishes a repeated request from a clash (empty: its delete came, and no request)
    digest: bytes = b""
    sequence: int  # of its newest event
    terminal: bool = False  # its one terminal event was reported
    cell: str | None = None  # where it was dispatched to
    host: str | None = None
    host_uuid: str | None = None
    code: str = ""
    reason: str = ""
    history: tuple[AttemptRecord, ...] = ()  # the attempts that its cell has reported


# --- what is reported of it


def is_newer(event: BuildEvent | ActionEvent, than: int, *, ends: bool = False) -> bool:
    """Whether an event counts beside what is on record. than: the number of the newest event there. ends: it ends what
    has not ended. That counts whatever its number: a cell whose database was lost starts its numbers again, and a later
    event may overtake the end.
    """
    return ends or event.sequence > than


def timeline_of(event: BuildEvent | ActionEvent, known: int, now: float) -> tuple[TimelineEntry, ...]:
    """One event as lines of the instance's timeline: the attempts that it reports for the first time, then itself.
    known: how many attempts are on record. Each line has its own time; the timeline is sorted by it.
    """
    actor = f"conductor {event.cell}" if event.cell else "conductor"
    kind = f"{event.kind} " if isinstance(event, ActionEvent) else ""
    attempts = tuple(
        TimelineEntry(at=tried.at or now, actor=actor, what=kind + tried.outcome, detail=_detail(tried.host, tried))
        for tried in event.history[known:]
        if tried.outcome != "active"  # the event itself is the entry of this attempt
    )
    stage_times = event.stage_times if isinstance(event, BuildEvent) else None
    what = kind + event.state.value
    return (
        *attempts,
        TimelineEntry(
            at=event.at or now, actor=actor, what=what, detail=_detail(event.host, event), stage_times=stage_times
        ),
    )


def _detail(host: str | None, of: BuildEvent | ActionEvent | AttemptRecord) -> str:
    where = f"{host} (attempt {of.attempt})" if host and of.attempt else host
    refusal = f"{of.code}: {of.reason}" if of.code and of.reason else of.code or of.reason
    return "; ".join(part for part in (where, refusal) if part)
