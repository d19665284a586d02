"""The base of every message: a frozen, versioned struct, the metadata that travels beside it, and the texts of its
fields. A text that has to match a pattern has its rule in words: a user never reads a regular expression.
"""

from __future__ import annotations

import re
from itertools import zip_longest
from typing import Annotated, Any

import msgspec
from msgspec import Meta as Bound
from msgspec import Struct

_WORDS: dict[str, str] = {}  # by the pattern as msgspec prints it
_PRINTED = re.compile(r"Expected `str` matching regex (?P<pattern>'.*?'|\".*?\")(?= - at `|$)", re.DOTALL)
OTHER = "a text of another form"


def matching(pattern: str, words: str, **bounds: Any) -> msgspec.Meta:
    """The bound of a text. words: the accepted values, in the words of a sentence ("1 to 64
    letters"). bounds: others.
    """
    _WORDS[repr(pattern)] = words
    return msgspec.Meta(pattern=pattern, **bounds)


def reason_of(error: Exception) -> str:
    """Why msgspec refused a value: its own sentence, with the rule in words where it prints a pattern."""
    return _PRINTED.sub(lambda found: f"Expected {_WORDS.get(found['pattern'], OTHER)}", str(error))


# A `$` alone lets a newline follow in Python, and a uuid with one is another dictionary key but the same database row.
_END = r"$(?!\n)"

# A UUID is its canonical text: lower case, with dashes. One spelling means one dictionary key and one row.
_UUID = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
Uuid = Annotated[str, matching(_UUID + _END, "a UUID in lower case with hyphens")]

# A word that is safe as one segment of a routing key and as part of a queue name.
Word = Annotated[str, matching(r"^[A-Za-z0-9_\-]{1,64}" + _END, "1 to 64 letters, digits, _ and -")]

# The longest role of a cell, berth-conductor-CELL, has 63 characters then, the most that PostgreSQL takes.
CellName = Annotated[str, matching(r"^[A-Za-z0-9_\-]{1,47}" + _END, "1 to 47 letters, digits, _ and -")]

# A name a person reads; never part of a routing key.
Label = Annotated[str, Bound(min_length=1, max_length=255)]
# The name of an availability zone, where it is made and where it is asked for: as a person writes it, at most 1,020
# bytes in UTF-8; never part of a routing key.
Zone = Annotated[
    str,
    matching(
        r"^(?!\s)[^\x00-\x1f\x7f-\x9f]{1,255}(?<!\s)" + _END,
        "1 to 255 characters, none of control, and no space at either end",
    ),
]
# What is shown of where an instance is; "": there are no zones.
ShownZone = Annotated[str, Bound(max_length=255)]

# A resource class or a trait, as Placement spells them.
ClassName = Annotated[str, matching(r"^[A-Z0-9_]{1,255}" + _END, "1 to 255 capital letters, digits and _")]
TraitName = ClassName

# Amounts are bounded as Placement bounds them (a signed 32-bit integer in its database).
MAX_AMOUNT = 2**31 - 1
Amount = Annotated[int, Bound(ge=1, le=MAX_AMOUNT)]
Count = Annotated[int, Bound(ge=0, le=MAX_AMOUNT)]
Version = Annotated[int, Bound(ge=0, le=2**62)]
Generation = Annotated[int, Bound(ge=0, le=2**62)]

# The number of one life of a service, and the number of a message within it. A message of a lower epoch counts no more,
# and its sender is told that epoch, to go on above it.
MAX_EPOCH = 2**62
Epoch = Annotated[int, Bound(ge=0, le=MAX_EPOCH)]
Sequence = Annotated[int, Bound(ge=0, le=2**62)]

# The number of an attempt to build an instance, from 1 (0: it is not known). A record may number on by thousands above
# one that it has been told of, and a column holds 2**31 - 1.
MAX_ATTEMPT = 2_000_000_000
Attempt = Annotated[int, Bound(ge=0, le=MAX_ATTEMPT)]
GivenAttempt = Annotated[int, Bound(ge=1, le=MAX_ATTEMPT)]

# The number of the history of a cell's database, from 1 (0: it is not known). It rises when the database was restored.
# Attempts are numbered by thousands of it (`reconcile`), so it is bounded as they are.
MAX_INCARNATION = MAX_ATTEMPT // 1000
Incarnation = Annotated[int, Bound(ge=0, le=MAX_INCARNATION)]
ORDER_OUTDATED = "order.outdated"  # why an order or a request is refused that was decided by a lower one

# The commits of a cell's database are counted in so many counters, so that those at once need not wait for each other.
SENT_SLOTS = 8
MAX_SENT_SEQUENCE = 10**15 - 1
SentSequences = Annotated[tuple[Annotated[int, Bound(ge=0, le=MAX_SENT_SEQUENCE)], ...], Bound(max_length=SENT_SLOTS)]

# The name of an image, of a snapshot too; "": none.
ImageName = Annotated[str, Bound(max_length=255)]

# Free text from outside is cut to this before it is stored or shown.
MAX_REASON = 2000
Reason = Annotated[str, Bound(max_length=MAX_REASON)]
# Who asked, for the record alone: a token's or a user's name ("": the client did not say). Nothing is decided by it,
# and a repeated request of another is the same request.
AskedBy = Annotated[str, Bound(max_length=255)]

# {class: amount} requested of one provider, and {provider: {class: amount}} requested of a tree.
Resources = dict[ClassName, Amount]
Allocations = Annotated[dict[Uuid, Resources], Bound(min_length=1, max_length=64)]


class Message(Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of every message on the bus. Its type and version are its tag (`build.request.v1`). A field may be added
    with a default; none is changed or reused: a changed meaning is a new version.
    """

    @property
    def weight(self) -> int:
        """How many requests it counts as, where the requests of several take turns."""
        return 1


class DatabaseMark(Struct, frozen=True, omit_defaults=True):
    """What a cell's database has had on disk, in this incarnation of it (0: nothing is known): so much in each counter
    of its commits. One that has less was restored.
    """

    database_incarnation: Incarnation = 0
    sent_sequences: SentSequences = ()

    def joined(self, other: DatabaseMark) -> DatabaseMark:
        """What was on disk by both: the later incarnation, and the highest of each counter in it."""
        if self.database_incarnation != other.database_incarnation:
            return max(self, other, key=lambda one: one.database_incarnation)
        if not other.is_above(self):
            return self
        highest = [max(pair) for pair in zip_longest(self.sent_sequences, other.sent_sequences, fillvalue=0)]
        while not highest[-1]:
            highest.pop()
        return DatabaseMark(self.database_incarnation, tuple(highest))

    def is_above(self, other: DatabaseMark) -> bool:
        """Whether it has something that the other one lacks."""
        if self.database_incarnation != other.database_incarnation:
            return self.database_incarnation > other.database_incarnation
        return any(one > two for one, two in zip_longest(self.sent_sequences, other.sent_sequences, fillvalue=0))


class Meta(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The metadata of one message: as AMQP properties and headers, or inside a batch item."""

    id: str  # unique per publish of one logical message (a redelivery repeats it)
    cause: str = ""  # the build request, state change or inventory report that led to this message
    sent_at: float = 0.0  # publisher's clock, seconds since the epoch
    # reply_to, correlation_id: where and under which id a reply is expected
    reply_to: str | None = None
    correlation_id: str | None = None
    # how long the publisher has a use for it (None: not stated), counted from when a consumer first has it; a
    # redelivery and a retry count from sent_at. A requester waits as long for its answer.
    timeout_s: float | None = None
    waited_s: float = 0.0  # how much of timeout_s passed before the consumers that had it retried
    traceparent: str | None = None  # W3C trace context
    retries: int = 0  # how often the consumer has already had this message retried
    # of the cell's database that the publisher decided by (0: it belongs to no cell). The receiver of a command refuses
    # a lower one than the highest that it knows of that cell.
    database_incarnation: int = 0
    sent_sequences: tuple[int, ...] = ()  # what its publisher knew to be on disk there when this left (DatabaseMark)

    @property
    def mark(self) -> DatabaseMark:
        """Of the cell's database."""
        return DatabaseMark(self.database_incarnation, self.sent_sequences)


class Refusal(Message, frozen=True, kw_only=True, tag="refusal.v1"):
    """The coded answer to a request that was understood well enough to be turned down."""

    code: str  # stable, dotted (`request.invalid`, `flavor.unknown`)
    reason: Reason = ""  # for a person


def tag_of(message: type[Message]) -> str:
    """The versioned tag of a message type, for example `build.request.v1`."""
    tag = message.__struct_config__.tag
    assert isinstance(tag, str), message
    return tag


encode = msgspec.json.Encoder(order=None).encode
