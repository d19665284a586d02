"""oslo.messaging's envelope 2.0 (`_drivers/common.py`, `_drivers/amqp.py`): calls as they come, and replies. Bodies are
hostile until `parse_call` or `parse_reply` has returned: bytes, depth and types are bounded here, and `arguments` are
plain JSON values that their reader checks.
"""

from __future__ import annotations

import bz2
import re
import zlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from bus.faults import Fault

VERSION_KEY: Final = "oslo.version"
MESSAGE_KEY: Final = "oslo.message"
ENVELOPE_VERSION: Final = "2.0"
CONTEXT: Final = "_context_"

# A call for a thousand instances has 200 kB; a broker of RabbitMQ 4 lets 16 MiB pass.
MAX_CALL_BYTES = 16 * 2**20
END_BYTES = 64 * 1024  # of a larger one, in which its ids are looked for
CALL_LIMIT_S = 1800.0  # for a client that does not say how long it waits: Nova's long_rpc_timeout
MAX_WORD = 255  # characters of a method, a version or an id: AMQP's bound of a short text
# How oslo.messaging names its reply queues, with and without its queue manager. A reply goes nowhere else: whoever may
# publish to the topic could otherwise have this process write into any queue.
REPLY_QUEUES: Final = "reply_"
VERSION = re.compile(r"\d{1,4}(?:\.\d{1,4}){0,2}")


class CallUnreadable(Fault):
    """A body that is no call of oslo.messaging."""

    code = "nova.call_unreadable"


class Call(Struct, frozen=True, kw_only=True):
    """One call (with a reply queue) or cast (without), as its client sent it."""

    method: str
    # arguments, context: JSON values, not checked further
    arguments: dict[str, Any] = {}
    version: str = "1.0"
    namespace: str = ""
    context: dict[str, Any] = {}
    reply_queue: str = ""
    message_id: str = ""
    # oslo.messaging's id of this message, the same when it is delivered again; "" when there is none
    unique_id: str = ""
    # the client gives up after so many seconds without a heartbeat (`call_monitor_timeout`); 0: it wants none
    timeout_s: int = 0
    limit_s: float | None = None  # seconds that it waits altogether (None: not stated)
    fanout: bool = False
    redelivered: bool = False  # it was delivered before, and may have been answered
    body: bytes = b""  # the envelope as it came
    unread: str = ""  # why only whom to answer is known of it (a code); "": it was read

    @property
    def is_answered(self) -> bool:
        """Whether its client waits for a reply. What each server gets has none: oslo.messaging sends casts alone so."""
        return bool(self.reply_queue and self.message_id) and not self.fanout

    @property
    def answer_timeout_s(self) -> float | None:
        """Seconds that its client waits for a first sign of life; None: it does not say."""
        return min((limit for limit in (self.limit_s, self.timeout_s) if limit), default=None)

    @property
    def requested_at(self) -> float | None:
        """When Nova's API took the user's request (Unix time, by its clock); None: it does not say. The message itself
        has no time: it was sent then or later.
        """
        told = self.context.get("timestamp")
        try:
            found = datetime.fromisoformat(told) if isinstance(told, str) else None
            return None if found is None else (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            return None

    @property
    def request_id(self) -> str:
        """Nova's id of the user's request (`req-...`), for logs; "" when there is none."""
        return self._of_context("request_id")

    @property
    def project_id(self) -> str:
        """The project of the user whose request it is; "" when there is none."""
        return self._of_context("project_id")

    def _of_context(self, key: str) -> str:
        found = self.context.get(key)
        return found[:MAX_WORD] if isinstance(found, str) else ""


class RemoteFault(Exception):
    """An exception that the client of a call raises: oslo.messaging rebuilds it from its class and module. Of modules
    that the client does not allow (Nova allows `nova.exception` and `builtins`) it raises RemoteError with the class
    name and the message.
    """

    def __init__(
        self,
        class_name: str,
        message: str,
        *,
        module: str = "nova.exception",
        arguments: Sequence[object] | None = None,  # arguments, keywords: what the class is called with
        keywords: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.class_name = class_name
        self.message = message
        self.module = module
        self.arguments = (message,) if arguments is None else tuple(arguments)
        self.keywords = dict(keywords or {})


def no_valid_host(reason: str) -> RemoteFault:
    """Nova's NoValidHost, whose text its API shows to the user of the request."""
    return RemoteFault("NoValidHost", f"No valid host was found. {reason}", keywords={"reason": reason, "code": 500})


def unsupported_version(method: str, version: str, supported: str) -> RemoteFault:
    """oslo.messaging's UnsupportedVersion, with the version that is supported."""
    message = f"Endpoint does not support RPC version {version}. Attempted method: {method}; it has {supported}"
    return RemoteFault(
        "UnsupportedVersion", message, module="oslo_messaging.rpc.dispatcher", arguments=(version, method)
    )


def no_such_method(method: str) -> RemoteFault:
    """oslo.messaging's NoSuchMethod."""
    message = f"Endpoint does not support RPC method {method}"
    return RemoteFault("NoSuchMethod", message, module="oslo_messaging.rpc.dispatcher", arguments=(method,))


class RemoteReply(Struct, frozen=True, kw_only=True):
    """One reply, as far as its bearer reads it."""

    message_id: str
    ending: bool  # False of a heartbeat
    body: bytes  # as it came


class CallOutcome(Struct, frozen=True, kw_only=True):
    """What a call has come to: its result, JSON values that are not checked, or the exception that it raised."""

    result: Any = None
    class_name: str = ""
    message: str = ""


# A JSON object of `oslo.version` and `oslo.message`, a text that is the JSON of the call: `method`, `args`, `version`,
# `namespace`; `_msg_id`, `_reply_q` and `_timeout` of a call that is answered; `_unique_id`; and `_context_*`.
def parse_call(
    body: bytes,
    *,
    compression: str = "",
    fanout: bool = False,
    redelivered: bool = False,
    limit_s: float | None = None,
) -> Call:
    """Parse the body of a delivery. compression: kombu's header of this name. limit_s: how long (seconds) its client
    waits. Raises CallUnreadable: nobody can be answered.
    """
    plain = _inflated(body, compression)
    try:
        message = _decoded(_payload(plain), dict[str, Any])
    except CallUnreadable as error:
        return _unread(plain, error)
    arguments = message.get("args", {})
    if not isinstance(arguments, dict):
        raise CallUnreadable("`args` is no object")
    method, version = _word(message, "method"), _word(message, "version") or "1.0"
    if not method or not VERSION.fullmatch(version):
        raise CallUnreadable("it names no method" if not method else "`version` is no version")
    reply_queue = _word(message, "_reply_q")
    if reply_queue and not reply_queue.startswith(REPLY_QUEUES):
        raise CallUnreadable(f"its reply queue does not begin with {REPLY_QUEUES}")
    return Call(
        method=method,
        arguments=arguments,
        version=version,
        namespace=_word(message, "namespace"),
        context={key[len(CONTEXT) :]: value for key, value in message.items() if key.startswith(CONTEXT)},
        reply_queue=reply_queue,
        message_id=_word(message, "_msg_id"),
        unique_id=_word(message, "_unique_id"),
        timeout_s=_whole(message.get("_timeout")),
        limit_s=limit_s,
        fanout=fanout,
        redelivered=redelivered,
        body=plain,
    )


def readdressed(body: bytes, reply_queue: str) -> bytes:
    """The call with another reply queue. All else stays byte by byte. Raises CallUnreadable."""
    message = _decoded(_payload(body), dict[str, Raw])
    message["_reply_q"] = Raw(msgspec.json.encode(reply_queue))
    return _enveloped(message)


def parse_reply(body: bytes) -> RemoteReply:
    """Parse a reply of another server. Raises CallUnreadable."""
    message = _decoded(_payload(body), dict[str, Any])
    return RemoteReply(message_id=_word(message, "_msg_id"), ending=message.get("ending") is True, body=body)


def parse_outcome(body: bytes) -> CallOutcome:
    """Parse the ending reply of another server further. Raises CallUnreadable."""
    message = _decoded(_payload(body), dict[str, Any])
    if not message.get("failure"):
        return CallOutcome(result=message.get("result"))
    failure = _decoded(message["failure"], dict[str, Any]) if isinstance(message["failure"], str) else {}
    return CallOutcome(
        class_name=str(failure.get("class", "Exception"))[:MAX_WORD], message=str(failure.get("message", ""))
    )


def encode_result(message_id: str, unique_id: str, result: object) -> bytes:
    """The reply with the result of a call: JSON values. Raises TypeError: it is something else."""
    return _reply(message_id, unique_id, result=result)


def encode_failure(message_id: str, unique_id: str, fault: RemoteFault) -> bytes:
    """The reply that raises an exception in the client (oslo.messaging's `serialize_remote_exception`)."""
    failure = {
        "class": fault.class_name,
        "module": fault.module,
        "message": fault.message,
        "tb": [],
        "args": fault.arguments,
        "kwargs": fault.keywords,
    }
    return _reply(message_id, unique_id, failure=msgspec.json.encode(failure).decode())


def encode_heartbeat(message_id: str, unique_id: str) -> bytes:
    """The reply that says that the call is under way. Only a client that gave a timeout can take it."""
    return _reply(message_id, unique_id, ending=False)


def encode_notification(fields: Mapping[str, object], *, context: Mapping[str, object], unique_id: str) -> bytes:
    """A notification, as oslo.messaging's driver `messagingv2` sends it."""
    return _enveloped({**fields, **{CONTEXT + key: value for key, value in context.items()}, "_unique_id": unique_id})


def _reply(
    message_id: str, unique_id: str, *, result: object = None, failure: str | None = None, ending: bool = True
) -> bytes:
    message = {"result": result, "failure": failure, "ending": ending, "_msg_id": message_id, "_unique_id": unique_id}
    return _enveloped(message)


def _enveloped(message: Mapping[str, object]) -> bytes:
    return msgspec.json.encode({VERSION_KEY: ENVELOPE_VERSION, MESSAGE_KEY: msgspec.json.encode(message).decode()})


def _inflated(body: bytes, compression: str) -> bytes:
    """The body as it was before kombu compressed it (`kombu_compression`), as far as it keeps within the bound."""
    try:
        match compression:
            case "":
                plain = body
            case "application/x-gzip":  # the name is kombu's: it is a zlib stream
                plain = zlib.decompressobj().decompress(body, MAX_CALL_BYTES + 1)
            case "application/x-bz2":
                plain = bz2.BZ2Decompressor().decompress(body, MAX_CALL_BYTES + 1)
            case _:
                raise CallUnreadable("its compression is neither gzip nor bz2")
    except (zlib.error, OSError, EOFError) as error:
        raise CallUnreadable("it cannot be decompressed") from error
    return plain


def _unread(body: bytes, refused: CallUnreadable) -> Call:
    """Of a call that cannot be read, whom to answer, by the end of its body, which of one beyond the bound is there,
    too: oslo.messaging writes the ids after the arguments. Raises CallUnreadable: nobody.
    """
    end = body[-END_BYTES:]
    found = {key: _last(end, key) for key in ("_msg_id", "_reply_q", "_unique_id")}
    if not found["_msg_id"] or not found["_reply_q"].startswith(REPLY_QUEUES):
        raise CallUnreadable(refused.reason)
    return Call(
        method="",
        reply_queue=found["_reply_q"],
        message_id=found["_msg_id"],
        unique_id=found["_unique_id"],
        unread=refused.code,
    )


def _last(end: bytes, key: str) -> str:
    """The last value of a key in the text of a message within its envelope, where its quotes have a backslash each."""
    found = re.findall(rb'(?<!\\)\\"' + key.encode() + rb'\\":\s*\\"([\w.-]{1,255})\\"', end, re.ASCII)
    return found[-1].decode() if found else ""


def _payload(body: bytes) -> str:
    """The text of the message in an envelope. Raises CallUnreadable."""
    if len(body) > MAX_CALL_BYTES:
        raise CallUnreadable(f"it has more than {MAX_CALL_BYTES} bytes", code="nova.call_too_large")
    envelope = _decoded(body, dict[str, Any])
    version, message = envelope.get(VERSION_KEY), envelope.get(MESSAGE_KEY)
    if not isinstance(message, str) or not isinstance(version, str):
        raise CallUnreadable("it is not in oslo.messaging's envelope")
    if version.partition(".")[0] != ENVELOPE_VERSION.partition(".")[0]:
        raise CallUnreadable(f"its envelope is not of version {ENVELOPE_VERSION}")
    return message


def _decoded(text: bytes | str, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CallUnreadable("it is no JSON object, or is nested too deeply") from error


def _word(message: Mapping[str, object], key: str) -> str:
    """A short text; "" for none. Raises CallUnreadable."""
    found = message.get(key)
    if found is None:
        return ""
    if not isinstance(found, str) or len(found.encode()) > MAX_WORD:
        raise CallUnreadable(f"`{key}` is no text of at most {MAX_WORD} bytes")
    return found


def _whole(value: object) -> int:
    """Whole seconds, as oslo.messaging reads a client's timeout; 0 for what is none, which it ignores as well. At most
    those that a call has: more is no expiration that the broker takes.
    """
    return int(min(value, CALL_LIMIT_S)) if isinstance(value, int | float) and value > 0 else 0
