"""Messages as bytes. One to a broker message: content-type `application/json`, metadata as AMQP properties and the
headers named here. Several: `application/vnd.berth.batch+json`, a JSON array of `{"meta": ..., "body": ...}`, only
between berth's own processes. An unreadable message is a value, never an exception.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Union, get_args, get_type_hints

import msgspec
import structlog
from msgspec import Struct, structs

from bus.contracts.base import (
    MAX_INCARNATION,
    MAX_REASON,
    MAX_SENT_SEQUENCE,
    SENT_SLOTS,
    Message,
    Meta,
    encode,
    reason_of,
    tag_of,
)
from bus.contracts.catalogue import (
    BY_TYPE,
    FORBIDDEN,
    MESSAGES,
    REPLIES,
    forbidden,
    may_come_under,
    operators_rights,
    routing_key,
    wrong_key,
)
from bus.contracts.queues import BY_QUEUE, PROJECT, QUEUES
from bus.contracts.replies import replies_to
from bus.json_values import NUL_REASON, has_more_values, has_nul
from bus.published_key import published_key
from bus.topology import EXTERNAL
from bus.transport import Delivery, Outgoing

log = structlog.get_logger(__name__)

JSON = "application/json"
BATCH = "application/vnd.berth.batch+json"

CAUSE = "berth-cause"
SENT_AT = "berth-sent-at-ms"  # whole milliseconds: a float header has 32 bits on the wire
RETRIES = "berth-retries"
TIMEOUT = "berth-timeout-ms"
WAITED = "berth-waited-ms"
INCARNATION = "berth-database-incarnation"
SENT_SEQUENCES = "berth-sent-sequences"
TRACEPARENT = "traceparent"

# Larger bodies are refused unread: the largest honest message is a snapshot page of 1,000 providers, about 2 MB.
MAX_BODY_BYTES = 16 * 2**20
# The bytes of a body beyond the bound that its dead letter keeps.
MAX_DEAD_LETTER_BYTES = 16 * 2**10
# The same where programs that are not berth's publish, and the values of such a body. The decoder is one call in C,
# during which nothing else runs: 17 ms for a megabyte of these, and 126 ms for one of empty lists where a request may
# carry any JSON. The largest request by its own bounds has 0.7 MB, and a batch of 64 with the longest lists 50,000
# values.
MAX_CLIENT_BYTES = 2**20
MAX_CLIENT_VALUES = 65_536
# A batch with more bytes than this was not made by a link of ours (half as many, `BusLimits`). 20 ms for a megabyte of
# gangs.
MAX_BATCH_BYTES = 2**20
# A batch with more items than this was not made by a link of ours (128, `BusLimits`). It is read in one step of the
# loop: 8 ms for so many bad ones.
MAX_BATCH_ITEMS = 512
# Ids and causes from outside are stored and logged, so they are bounded. AMQP allows names of as many bytes.
MAX_ID = 255
# A reply queue's name gets a prefix on some systems, and has to stay a name.
MAX_REPLY_TO = 200
# Times in seconds and retries beyond these cannot be written into a header again.
MAX_TIME_S = 2**43
MAX_RETRIES = 1000
# A time never leaves later than it was; a value that today's floats cannot distinguish from a whole millisecond stays
# that one.
SLACK_MS = 0.0005

MALFORMED = "message.malformed"
UNKNOWN_TYPE = "message.unknown_type"
INVALID = "message.invalid"
TOO_LARGE = "message.too_large"
WRONG_KEY = "message.wrong_key"
REPLY_TO = "message.reply_to"
DROPPED = "message.dropped"

_is_sent = re.compile(rf"[0-9]{{1,15}}(?: [0-9]{{1,15}}){{0,{SENT_SLOTS - 1}}}").fullmatch
_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]+)`")
_FROM_OUTSIDE = frozenset(row.name for row in QUEUES if row.from_outside)
# In a project's virtual host every key is the project's: what comes there names it, whatever a key or a body says.
_OF_PROJECTS = frozenset(row.name for row in QUEUES if row.where is PROJECT)
_MAX_VALUES = {row.name: row.max_values for row in QUEUES}
_MAX_REPLY_VALUES = {tag_of(row.reply): row.max_reply_values for row in MESSAGES if row.reply is not None}
# The texts of these requests come into records; placement checks every name by itself.
_OUTSIDE = {"client", "operator"}
_BY_OTHERS = {row.message for row in MESSAGES if row.owner == "scheduler_worker" and _OUTSIDE & {*row.publishers}}
_ROWS_BY_TAG = {tag_of(kind): kind for kind in (*(row.message for row in MESSAGES), *REPLIES)}
_encode_meta = msgspec.json.Encoder().encode
_decode_meta = msgspec.json.Decoder(Meta).decode


class Packed(Struct, frozen=True):
    """One message ready to be sent, alone or with others."""

    body: bytes
    meta: Meta
    type: str
    headers: Mapping[str, str | int | float] = {}  # further ones, of a message that is sent alone


class Read(Struct, frozen=True):
    """One message that could be read."""

    message: Message
    meta: Meta


class Malformed(Struct, frozen=True):
    """A message that could not be read: its bytes, a stable code, and why. The body may hold secrets; never log it."""

    body: bytes
    code: str
    reason: str
    meta: Meta
    queue: str = ""
    key: str = ""  # the routing key that it was published with (`published_key`)
    size: int = 0  # the bytes of its body where only the first are kept; 0: all are


class _RawItem(Struct):
    meta: msgspec.Raw = msgspec.Raw(b"")
    body: msgspec.Raw = msgspec.Raw(b"")


class _Peek(Struct):
    type: str | None = None


_decode_raw = msgspec.json.Decoder(list[_RawItem]).decode
_decode_peek = msgspec.json.Decoder(_Peek).decode


@cache
def tag(kind: type[Message]) -> str:
    """The versioned tag of a message type."""
    return tag_of(kind)


def pack(message: Message, meta: Meta) -> Packed:
    """Encode a message; raises what msgspec raises when it holds something that is not JSON."""
    return Packed(encode(message), meta, tag(type(message)))


def single(packed: Packed, exchange: str, key: str, **options: Any) -> Outgoing:
    """One message as a broker message that any AMQP client can read."""
    meta = packed.meta
    return Outgoing(
        exchange=exchange,
        routing_key=key,
        body=packed.body,
        content_type=JSON,
        message_id=meta.id,
        type=packed.type,
        correlation_id=meta.correlation_id,
        reply_to=meta.reply_to,
        headers={**headers_of(meta), **packed.headers},
        **options,
    )


def batch(items: Sequence[Packed], exchange: str, key: str, **options: Any) -> Outgoing:
    """Several messages as one broker message."""
    body = b",".join([b'{"meta":' + _encode_meta(item.meta) + b',"body":' + item.body + b"}" for item in items])
    return Outgoing(
        exchange=exchange,
        routing_key=key,
        body=b"[" + body + b"]",
        content_type=BATCH,
        message_id=items[0].meta.id,
        **options,
    )


def headers_of(meta: Meta) -> dict[str, str | int | float]:
    """The headers that carry what AMQP has no property for."""
    headers: dict[str, str | int | float] = {}
    if meta.cause:
        headers[CAUSE] = meta.cause
    if meta.sent_at:
        headers[SENT_AT] = math.floor(meta.sent_at * 1000 + SLACK_MS)
    if meta.retries:
        headers[RETRIES] = meta.retries
    if meta.timeout_s is not None:
        headers[TIMEOUT] = round(meta.timeout_s * 1000)
    if meta.waited_s:
        headers[WAITED] = round(meta.waited_s * 1000)
    if meta.traceparent:
        headers[TRACEPARENT] = meta.traceparent
    if meta.database_incarnation:
        headers[INCARNATION] = meta.database_incarnation
    if meta.sent_sequences:
        headers[SENT_SEQUENCES] = " ".join(map(str, meta.sent_sequences))
    return headers


class Codec:
    """Reads what arrives on one queue, which admits these message types and no others."""

    def __init__(self, kinds: Sequence[type[Message]], *, queue: str = "") -> None:
        self._queue = queue
        self._may_answer = _answerable(queue)
        self._is_from_outside = queue in _FROM_OUTSIDE
        self._binds_keys = queue not in _OF_PROJECTS
        self._most_bytes = most_bytes(queue)
        self._most_values = MAX_CLIENT_VALUES if self._is_from_outside else _MAX_VALUES.get(queue, 0)
        self._by_tag = {tag_of(kind): msgspec.json.Decoder(kind) for kind in kinds}
        self._only = tag_of(kinds[0]) if len(kinds) == 1 else None
        self._fields = sorted({name for kind in kinds for name in _field_names(kind)})
        self._heads = [(_head(BY_TYPE[kind].key), tag_of(kind)) for kind in kinds if kind in BY_TYPE]
        self._heads.sort(key=lambda pair: -len(pair[0]))
        self._batch = _batch_decoder(tuple(kinds))

    def read(self, delivery: Delivery, new_id: str) -> list[Read | Malformed]:
        """All messages of a delivery, in order. `new_id` stands in for a missing message id. A message under a routing
        key that is not its own is malformed (`may_come_under`). One whose key the broker has not checked is no message:
        it may be an answer to one.
        """
        key = published_key(delivery)
        if key is None:
            return []
        try:
            return self._read(delivery, new_id, key)
        except Exception as error:  # the input is hostile, and no error of it may end the consumer
            log.exception("message.unreadable", queue=self._queue)
            return [self._malformed(delivery.body, MALFORMED, type(error).__name__, Meta(id=new_id), key)]

    def _read(self, delivery: Delivery, new_id: str, key: str) -> list[Read | Malformed]:
        too_large = self._too_large(delivery.body, delivery.type, is_batch=delivery.content_type == BATCH)
        if delivery.content_type == BATCH and not too_large:
            return self._read_batch(delivery, new_id, key)
        return [self._read_whole(delivery, new_id, key, TOO_LARGE, too_large)]

    def _too_large(self, body: bytes, named: str | None, *, is_batch: bool) -> str:
        """Why a body is not read; "": it is. The values of a batch of workers are as many as its bytes allow."""
        size, most = len(body), min(self._most_bytes, MAX_BATCH_BYTES) if is_batch else self._most_bytes
        if size > most:
            more = "more than " if size > self._most_bytes else ""  # the transport may have cut it there
            return f"the body has {more}{min(size, self._most_bytes)} bytes, {most} are allowed"
        bound = (
            self._most_values or _MAX_REPLY_VALUES.get(named or "", 0) if self._is_from_outside or not is_batch else 0
        )
        if bound and size > bound and has_more_values(body, bound):
            return f"the body has more than {bound} values"
        return ""

    def _read_batch(self, delivery: Delivery, new_id: str, key: str) -> list[Read | Malformed]:
        try:
            items = self._batch.decode(delivery.body)
            are_sound = all(self._is_sound(item.meta, item.body, key) for item in items)
            if len(items) <= MAX_BATCH_ITEMS and are_sound and not has_nul(delivery.body):
                return [Read(item.body, item.meta) for item in items]
        except (msgspec.DecodeError, UnicodeDecodeError):
            return self._read_apart(delivery, new_id, key)
        except RecursionError:
            return [self._read_whole(delivery, new_id, key, MALFORMED, "nested too deeply")]
        return self._read_apart(delivery, new_id, key)

    def _read_apart(self, delivery: Delivery, new_id: str, key: str) -> list[Read | Malformed]:
        """The slow way, when one item at least is bad: its neighbours must not suffer."""
        try:
            items = _decode_raw(delivery.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return [self._read_whole(delivery, new_id, key, MALFORMED, reason_of(error))]
        if len(items) > MAX_BATCH_ITEMS:
            reason = f"the batch has {len(items)} items, {MAX_BATCH_ITEMS} are allowed"
            return [self._read_whole(delivery, new_id, key, TOO_LARGE, reason)]
        return [self._read_item(item, f"{_id(delivery, new_id)}.{number}", key) for number, item in enumerate(items)]

    def _read_whole(self, delivery: Delivery, new_id: str, key: str, code: str, reason: str) -> Read | Malformed:
        """A body as one message, with the properties as its metadata. reason: why it is unreadable; "": it may be
        readable.
        """
        meta, problem = _meta(delivery, new_id)
        if not self._may_be_answered(meta):
            return self._unanswerable(delivery.body, meta, key)
        if reason or problem:
            return self._malformed(delivery.body, code if reason else INVALID, reason or problem, meta, key)
        return self._read_one(delivery.body, meta, delivery.type, key)

    def _read_item(self, item: _RawItem, new_id: str, key: str) -> Read | Malformed:
        body = bytes(item.body)
        try:
            meta = _decode_meta(item.meta)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self._malformed(body, INVALID, f"meta: {reason_of(error)}", Meta(id=new_id), key)
        if not _may_travel(meta):
            return self._malformed(body, INVALID, "meta: a name or number is beyond its bound", Meta(id=new_id), key)
        if not self._may_be_answered(meta):
            return self._unanswerable(body, meta, key)
        return self._read_one(body, meta, None, key)

    def _read_one(self, body: bytes, meta: Meta, named: str | None, key: str) -> Read | Malformed:
        try:
            name = named or _decode_peek(body).type or self._by_key(key) or self._only
            decoder = self._by_tag.get(name or "")
            if decoder is None:
                return self._malformed(body, UNKNOWN_TYPE, self._unknown(name), meta, key)
            message = decoder.decode(body)
            if type(message) in _BY_OTHERS and has_nul(body):
                return self._malformed(body, INVALID, NUL_REASON, meta, key)
            if not self._may_come(message, key):
                is_forbidden = not self._binds_keys or key == routing_key(message)
                code, reason = (FORBIDDEN, forbidden(message)) if is_forbidden else (WRONG_KEY, wrong_key(message, key))
                return self._malformed(body, code, reason, meta, key)
            return Read(message, meta)
        except msgspec.ValidationError as error:
            return self._malformed(body, INVALID, _with_suggestion(reason_of(error), self._fields), meta, key)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self._malformed(body, MALFORMED, reason_of(error), meta, key)
        except RecursionError:
            return self._malformed(body, MALFORMED, "nested too deeply", meta, key)

    def _is_sound(self, meta: Meta, message: Message, key: str) -> bool:
        return _may_travel(meta) and self._may_be_answered(meta) and self._may_come(message, key)

    def _may_come(self, message: Message, key: str) -> bool:
        """Whether its publisher may request this."""
        return may_come_under(message, key) if self._binds_keys and key else not key or not operators_rights(message)

    def _may_be_answered(self, meta: Meta) -> bool:
        """Whether a reply to it, if one is wanted, would go where replies go."""
        return meta.reply_to is None or self._may_answer(meta.reply_to) is not None

    def _by_key(self, key: str) -> str | None:
        return next((name for head, name in self._heads if key == head or key.startswith(head + ".")), None)

    def _unknown(self, name: str | None) -> str:
        problem = f"{name[:MAX_ID]!r} is not taken here" if name else "no type is given"
        return f"{problem}; taken are: {', '.join(self._by_tag)}"

    def _unanswerable(self, body: bytes, meta: Meta, key: str) -> Malformed:
        reason = "no reply goes there: name a queue that the broker has named, and bind it to berth.replies by its name"
        return self._malformed(body, REPLY_TO, reason, structs.replace(meta, reply_to=None), key)

    def _malformed(self, body: bytes, code: str, reason: str, meta: Meta, key: str) -> Malformed:
        """Return a message as unreadable. Of a body beyond the bound only the first bytes are kept."""
        kept, size = (body, 0) if len(body) <= self._most_bytes else (body[:MAX_DEAD_LETTER_BYTES], len(body))
        return Malformed(kept, code, reason[:MAX_REASON], meta, self._queue, key, size)


# Taking the annotations of a message apart costs milliseconds, and a process has a reader for each of its queues.
@cache
def _batch_decoder(kinds: tuple[type[Message], ...]) -> msgspec.json.Decoder[Any]:
    """Of a batch that may hold these messages."""
    item = msgspec.defstruct("Item", [("meta", Meta), ("body", Union[kinds])])  # noqa: UP007
    return msgspec.json.Decoder(list[item])  # type: ignore[valid-type]


@cache
def _field_names(kind: type[Struct]) -> frozenset[str]:
    """Of a message and of the structs in its fields."""
    names = set(kind.__struct_fields__)
    for hint in get_type_hints(kind).values():
        for part in (hint, *get_args(hint)):
            if isinstance(part, type) and issubclass(part, Struct):
                names |= _field_names(part)
    return frozenset(names)


def _with_suggestion(reason: str, fields: Sequence[str]) -> str:
    """msgspec's message about a field that does not exist, with the nearest one that does."""
    found = _UNKNOWN_FIELD.search(reason)
    near = difflib.get_close_matches(found[1][:MAX_ID], fields, n=1) if found is not None else []
    return f"{reason}; did you mean `{near[0]}`?" if near else reason


def most_bytes(queue: str) -> int:
    """The bound of a body in a queue (its local name), beyond which it is neither kept nor read."""
    return MAX_CLIENT_BYTES if queue in _FROM_OUTSIDE else MAX_BODY_BYTES


def kind_of(name: str) -> type[Message] | None:
    """The message type of a tag, None when there is none."""
    return _ROWS_BY_TAG.get(name)


@cache
def _answerable(queue: str) -> Callable[[str], re.Match[str] | None]:
    """Tells a name of a queue to which the consumer of this one (a row's name; "": of none) may send a reply."""
    names = replies_to([queue], foreign=f"{EXTERNAL}?") if queue in BY_QUEUE else ()
    return re.compile("|".join(names) or r"(?!)").fullmatch


def _may_travel(meta: Meta) -> bool:
    """Whether metadata out of a batch fit the properties and headers in which a retry or a dead letter carries them.

    A property of a single message has passed these checks already.
    """
    return (
        _is_within(meta.id, MAX_ID)
        and _is_within(meta.correlation_id or "", MAX_ID)
        and _is_within(meta.reply_to or "", MAX_REPLY_TO)
        and len(meta.cause) <= MAX_ID
        and len(meta.traceparent or "") <= MAX_ID
        and abs(meta.sent_at) < MAX_TIME_S
        and abs(meta.timeout_s or 0.0) < MAX_TIME_S
        and abs(meta.waited_s) < MAX_TIME_S
        and 0 <= meta.retries <= MAX_RETRIES
        and 0 <= meta.database_incarnation <= MAX_INCARNATION
        and len(meta.sent_sequences) <= SENT_SLOTS
        and all(0 <= one <= MAX_SENT_SEQUENCE for one in meta.sent_sequences)
    )


def may_batch(meta: Meta) -> bool:
    """Whether metadata can stand in the JSON of a batch: a foreign client's ids may be bytes that are no text, or be
    longer than its reader allows."""
    return is_text(meta.correlation_id or "") and is_text(meta.reply_to or "") and _may_travel(meta)


def is_text(text: str) -> bool:
    """False: it holds bytes that are not UTF-8 (`surrogateescape`)."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(text: str) -> str:
    """A foreign client's text as it may be stored, logged and printed: bytes that are not UTF-8 are spelled out."""
    if is_text(text):
        return text
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _is_within(text: str, most_bytes: int) -> bool:
    return len(text) * 4 <= most_bytes or len(text.encode()) <= most_bytes


def _head(template: str) -> str:
    """The words of a key template before its first placeholder."""
    return template.partition(".{")[0]


def _meta(delivery: Delivery, new_id: str) -> tuple[Meta, str]:
    """Metadata from properties and headers, and their errors (empty: nothing). A publisher that sets an expiration has
    no use for the message after it, whether it says so in a header or not.
    """
    headers = delivery.headers
    numbers, problem = _numbers(headers)
    sent = headers.get(SENT_SEQUENCES, "")
    if not isinstance(sent, str) or (sent and not _is_sent(sent)):
        sent, problem = "", f"header {SENT_SEQUENCES} is not a list of numbers"
    timeout_ms = numbers[TIMEOUT]
    meta = Meta(
        id=_id(delivery, new_id),
        cause=_text(headers, CAUSE) or "",
        sent_at=(numbers[SENT_AT] or 0.0) / 1000,
        reply_to=delivery.reply_to or None,
        correlation_id=delivery.correlation_id or None,
        timeout_s=delivery.expiration_s if timeout_ms is None else timeout_ms / 1000,
        waited_s=(numbers[WAITED] or 0.0) / 1000,
        traceparent=_text(headers, TRACEPARENT),
        retries=max(0, min(MAX_RETRIES, int(numbers[RETRIES] or 0))),
        database_incarnation=int(numbers[INCARNATION] or 0),
        sent_sequences=tuple(map(int, sent.split())),
    )
    return meta, problem


def _id(delivery: Delivery, new_id: str) -> str:
    """The message's id as text, short enough to be sent on."""
    return shown(delivery.message_id or new_id).encode()[:MAX_ID].decode(errors="ignore")


def _text(headers: Mapping[str, object], name: str) -> str | None:
    value = headers.get(name)
    return value[:MAX_ID] if isinstance(value, str) else None


def _numbers(headers: Mapping[str, object]) -> tuple[dict[str, float | None], str]:
    found: dict[str, float | None] = {}
    problem = ""
    for name in (SENT_AT, TIMEOUT, WAITED, RETRIES, INCARNATION):
        value = headers.get(name)
        sound = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53
        found[name] = float(value) if sound else None  # type: ignore[arg-type]
        if value is not None and not sound:
            problem = f"header {name} is not a number"
    if not 0 <= (found[INCARNATION] or 0) <= MAX_INCARNATION:  # cut down to its bound it would be above all others
        found[INCARNATION], problem = None, f"header {INCARNATION} is beyond its bound"
    return found, problem
