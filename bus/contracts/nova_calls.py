"""How the frontends of a Nova decide its calls, announced for the pages. The same is in the frontends' logs."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta as Bound
from msgspec import Struct

from bus.contracts.base import Count, Label, Message, Reason
from bus.contracts.build import HostScore

MAX_NAMED = 20  # instances that are named, of a call that may have many
MAX_HOSTS = 32  # of one instance, or of one reason of a step
MAX_STEPS = 64
MAX_REASONS = 64  # of one step
MAX_LOST = 100

MAX_PHRASE = 255
Phrase = Annotated[str, Bound(max_length=MAX_PHRASE)]
HostName = Annotated[str, Bound(max_length=600)]  # with its node's, where they differ
HostNames = Annotated[tuple[HostName, ...], Bound(max_length=MAX_HOSTS)]


class DecisionStep(Struct, frozen=True, kw_only=True):
    """One step of the funnel: the hosts that it left, those that it rejected by reason, and the first of these by name
    ("": for several reasons).
    """

    step: Phrase
    remaining: Count
    rejected: Annotated[dict[Phrase, Count], Bound(max_length=MAX_REASONS)] = {}
    hosts: Annotated[dict[Phrase, HostNames], Bound(max_length=MAX_REASONS)] = {}


class CallDecision(Struct, frozen=True, kw_only=True):
    """How one call was decided."""

    event: Phrase
    request_id: Phrase
    # timestamp, process: of a line of the log
    timestamp: Phrase = ""
    process: Phrase = ""
    instances: Annotated[tuple[Phrase, ...], Bound(max_length=MAX_NAMED)] = ()
    count: Count = 0
    reason: Reason = ""  # why it has no host, or was left to the fallback
    step: Phrase = ""
    detail: Reason = ""
    lost: Annotated[tuple[Reason, ...], Bound(max_length=MAX_LOST)] = ()  # claims that got nothing, as "host: outcome"
    funnel: Annotated[tuple[DecisionStep, ...], Bound(max_length=MAX_STEPS)] = ()
    # of each of the first instances, the chosen one and its alternates
    hosts: Annotated[tuple[HostNames, ...], Bound(max_length=MAX_NAMED)] = ()
    project_id: Phrase = ""  # of the user who asked
    # the weights of the hosts of the first instance
    scores: Annotated[tuple[HostScore, ...], Bound(max_length=MAX_HOSTS)] = ()


class ComparedAnswer(Struct, frozen=True, kw_only=True):
    """One scheduler's answer: the host of each of the first instances, or why there is none."""

    hosts: Annotated[tuple[HostName, ...], Bound(max_length=MAX_NAMED)] = ()
    reason: Reason = ""
    took_s: float = 0.0


class CallCompared(Struct, frozen=True, kw_only=True):
    """A call that the stock scheduler has decided, and berth in its shadow otherwise."""

    difference: Phrase
    stock: ComparedAnswer
    berth: ComparedAnswer
    instances: Annotated[tuple[Phrase, ...], Bound(max_length=MAX_NAMED)] = ()
    rule: Reason = ""  # that the stock scheduler's choice breaks
    project_id: Phrase = ""  # of the user who asked


class NovaCall(Message, frozen=True, kw_only=True, tag="nova.call.v1"):
    """What a frontend tells of a call of Nova's: how it was decided, or how the stock scheduler's answer differs.

    Lost without harm.
    """

    request_id: Phrase
    at: float  # seconds since the epoch
    worker: Label  # the frontend
    decision: CallDecision | None = None
    compared: CallCompared | None = None
