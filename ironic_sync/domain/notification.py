"""Ironic's notifications: the oslo.messaging 2.0 envelope and the versioned objects in it, parsed from hostile bytes.

Nothing here ever returns or quotes a body: `_context_auth_token` is a live token where Keystone is used.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from bus.contracts.base import Uuid, reason_of
from bus.contracts.host_metrics import HostReading
from bus.json_values import has_more_values
from ironic_sync.domain.node import ShortText
from ironic_sync.domain.sensors import SENSOR_EVENT, parse_sensors

MAX_BODY_BYTES: Final = 1024 * 1024  # the largest recorded one has 5 kB; driver_info and instance_info are free-form
# Values of sensor data, whose values are each hardware type's own, so that all of them are built: 13 ms for so many.
# The 2,000 sensors that are read of one node have 20,000.
MAX_SENSOR_VALUES: Final = 65_536
MAX_REQUEST_ID: Final = 64


class Status(StrEnum):
    """How far the announced action is."""

    START = "start"
    END = "end"
    SUCCESS = "success"
    ERROR = "error"


class Notification(Struct, frozen=True, kw_only=True):
    """One notification, reduced to what matters here. UNSET: the payload does not have the field (null is a value)."""

    message_id: str
    request_id: str  # correlates with the API's x-openstack-request-id
    publisher: str
    kind: str
    action: str
    status: Status
    uuid: str | None = None  # uuid of the object itself
    node_uuid: str | None = None  # the node that an allocation, port or port group names
    provision_state: str | UnsetType | None = UNSET
    power_state: str | UnsetType | None = UNSET
    maintenance: bool | UnsetType | None = UNSET
    instance_uuid: str | UnsetType | None = UNSET
    updated_at: str | None = None

    @property
    def subject(self) -> str | None:
        """The node this is about."""
        return self.uuid if self.kind == "node" else self.node_uuid

    @property
    def event(self) -> str:
        """The event type without the leading `baremetal.`."""
        return f"{self.kind}.{self.action}.{self.status}"


class Sensors(Struct, frozen=True, kw_only=True):
    """Sensor data, of a node or of one of Ironic's own conductors."""

    event: str
    reading: HostReading | None = None  # what was understood (None: nothing)


class Rejected(Struct, frozen=True, kw_only=True):
    """A message that is no notification of Ironic."""

    code: str  # stable code
    reason: str  # one sentence, which quotes no content
    request_id: str = ""


class _Envelope(Struct, rename={"version": "oslo.version", "message": "oslo.message"}):
    version: ShortText
    message: str


class _Data(Struct):
    uuid: Uuid | None = None
    node_uuid: Uuid | None = None
    provision_state: ShortText | UnsetType | None = UNSET
    power_state: ShortText | UnsetType | None = UNSET
    maintenance: bool | UnsetType | None = UNSET
    instance_uuid: ShortText | UnsetType | None = UNSET
    updated_at: ShortText | None = None


class _Payload(Struct, rename={"data": "ironic_object.data", "namespace": "ironic_object.namespace"}):
    data: _Data
    namespace: ShortText


class _Inner(Struct, rename={"request_id": "_context_request_id"}):
    message_id: ShortText
    publisher_id: ShortText
    event_type: ShortText
    payload: _Payload
    request_id: str | None = None


class _Traceable(Struct, rename={"request_id": "_context_request_id"}):
    request_id: str | None = None


class _Typed(Struct):
    event_type: ShortText


_envelope = msgspec.json.Decoder(_Envelope)
_inner = msgspec.json.Decoder(_Inner)
_typed = msgspec.json.Decoder(_Typed)
_traceable = msgspec.json.Decoder(_Traceable)


def parse(body: bytes) -> Notification | Sensors | Rejected:
    """A notification, sensor data, or why it is neither. Never raises, whatever the bytes."""
    if len(body) > MAX_BODY_BYTES:
        return Rejected(code="notification.too_large", reason=f"{len(body)} bytes, at most {MAX_BODY_BYTES}")
    try:
        envelope = _envelope.decode(body)
    except msgspec.ValidationError as error:
        return Rejected(code="notification.not_oslo", reason=reason_of(error))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Rejected(code="notification.malformed", reason="the body is not JSON")
    if envelope.version.partition(".")[0] != "2":
        return Rejected(code="notification.version", reason="the envelope is not of version 2")
    return _parse_inner(envelope.message)


def _parse_inner(text: str) -> Notification | Sensors | Rejected:
    try:
        inner = _inner.decode(text)
    except msgspec.ValidationError as error:  # sensor data has no versioned objects
        if (event := _sensor_event(text)) is not None:
            if len(text) > MAX_SENSOR_VALUES and has_more_values(text.encode(), MAX_SENSOR_VALUES):
                reason = f"sensor data of more than {MAX_SENSOR_VALUES} values"
                return Rejected(code="notification.too_large", reason=reason)
            return Sensors(event=event, reading=parse_sensors(text))
        return Rejected(code="notification.invalid", reason=reason_of(error), request_id=_request_id_of(text))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return Rejected(code="notification.malformed", reason="the enveloped message is not JSON")
    return _of(inner)


def _sensor_event(text: str) -> str | None:
    try:
        event = _typed.decode(text).event_type
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return event if SENSOR_EVENT.fullmatch(event) else None


def _of(inner: _Inner) -> Notification | Rejected:
    request_id = (inner.request_id or "")[:MAX_REQUEST_ID]
    parts = inner.event_type.split(".")
    if not _EVENT.fullmatch(inner.event_type) or inner.payload.namespace != "ironic":
        return Rejected(code="notification.unknown_event", reason="not a baremetal event", request_id=request_id)
    data = inner.payload.data
    return Notification(
        message_id=inner.message_id,
        request_id=request_id,
        publisher=inner.publisher_id,
        kind=parts[1],
        action=parts[2],
        status=Status(parts[3]),
        uuid=data.uuid,
        node_uuid=data.node_uuid,
        provision_state=data.provision_state,
        power_state=data.power_state,
        maintenance=data.maintenance,
        instance_uuid=data.instance_uuid,
        updated_at=data.updated_at,
    )


# Strict, because the values become labels and log fields.
_EVENT: Final = re.compile(r"baremetal\.[a-z_]{1,40}\.[a-z_]{1,40}\.(start|end|success|error)")


def _request_id_of(text: str) -> str:
    """The request id of a message that is otherwise wrong, so that the log line can be followed to its cause."""
    try:
        return (_traceable.decode(text).request_id or "")[:MAX_REQUEST_ID]
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return ""
