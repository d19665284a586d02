"""Nova's notifications `scheduler.select_destinations.start` and `.end`, in the versioned form, as Nova 34 writes them.

A notification is made of the RequestSpec as it came: its payload objects have the values of the spec's objects, by the
tables here. It never holds an answer up: notifications wait in a bounded queue, and one that finds it full is dropped.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import structlog

from bus.clock import Clock
from bus.rabbitmq.transport import RabbitTransport
from bus.transport import BusError, Outgoing
from nova_scheduler.config import NotificationSettings
from nova_scheduler.metrics import NOTIFICATIONS
from nova_scheduler.wire.envelope import Call, encode_notification
from nova_scheduler.wire.queues import RabbitOptions, topic_queue
from nova_scheduler.wire.versioned import NAMESPACE, OBJECT

log = structlog.get_logger("nova")

START: Final = "scheduler.select_destinations.start"
END: Final = "scheduler.select_destinations.end"
SOURCE, PRIORITY = "nova-scheduler", "INFO"
MAX_WAITING = 256  # notifications that are not published yet
MAX_BYTES = 512 * 1024  # of a call that is notified about; one for a thousand instances has 200 kB
# Of a request's context, what oslo.context leaves of it for notifications: no token, no catalogue of services.
CONTEXT = (
    "user_id", "project_id", "domain_id", "user_domain_id", "project_domain_id", "request_id", "roles", "user_name",
    "project_name", "domain_name", "user_domain_name", "project_domain_name", "global_request_id", "system_scope",
    "is_admin",
)  # fmt: skip


class _Payload(NamedTuple):
    """Class and version of a payload object; its fields, which have the names that they have in the source. None: those
    that are set there.
    """

    name: str
    version: str
    fields: tuple[str, ...] | None


_FLAVOR = _Payload(
    "FlavorPayload",
    "1.4",
    (
        "flavorid", "memory_mb", "vcpus", "root_gb", "ephemeral_gb", "name", "swap", "rxtx_factor", "vcpu_weight",
        "disabled", "is_public", "extra_specs", "projects", "description",
    ),
)  # fmt: skip
_IMAGE = _Payload(
    "ImageMetaPayload",
    "1.0",
    (
        "id", "name", "status", "visibility", "protected", "checksum", "owner", "size", "virtual_size",
        "container_format", "disk_format", "created_at", "updated_at", "tags", "direct_url", "min_ram", "min_disk",
    ),
)  # fmt: skip
_PROPERTIES = _Payload("ImageMetaPropsPayload", "1.20", None)
_GROUP_FIELDS = ("uuid", "name", "user_id", "project_id", "policies", "members", "hosts", "policy")
_GROUP = _Payload("ServerGroupPayload", "1.1", _GROUP_FIELDS)
_DESTINATION = _Payload("DestinationPayload", "1.0", ("aggregates",))
_CELL = _Payload("CellMappingPayload", "2.0", ("uuid", "name", "disabled"))
_RETRY = _Payload("SchedulerRetriesPayload", "1.0", ("num_attempts",))
_PCI = _Payload("InstancePCIRequestsPayload", "1.0", ("instance_uuid",))
_PCI_FIELDS = ("count", "spec", "alias_name", "request_id", "numa_policy")
_PCI_REQUEST = _Payload("InstancePCIRequestPayload", "1.1", _PCI_FIELDS)
_NUMA = _Payload("InstanceNUMATopologyPayload", "1.0", ("instance_uuid", "emulator_threads_policy"))
_NUMA_CELL = _Payload(
    "InstanceNUMACellPayload",
    "1.2",
    (
        "id", "cpuset", "pcpuset", "cpuset_reserved", "memory", "pagesize", "cpu_pinning_raw", "cpu_policy",
        "cpu_thread_policy",
    ),
)  # fmt: skip
_CPU_TOPOLOGY = _Payload("VirtCPUTopologyPayload", "1.0", ("sockets", "cores", "threads"))
_SPEC = _Payload(
    "RequestSpecPayload",
    "1.1",
    (
        "ignore_hosts", "instance_uuid", "project_id", "user_id", "availability_zone", "num_instances",
        "scheduler_hints",
    ),
)  # fmt: skip


def payload_of(spec: object) -> dict[str, Any]:
    """The payload of both notifications. spec: a serialised RequestSpec; what is none of Nova's in it is left out."""
    data = _data(spec)
    read = (data.get(key) for key in ("image", "instance_group", "requested_destination", "retry"))
    image, group, asked, retry = map(_data, read)
    return _made(
        _SPEC,
        data,
        flavor=_made(_FLAVOR, _data(data.get("flavor"))) if data.get("flavor") else None,
        image=_image(image) if image else None,
        numa_topology=_numa(data),
        pci_requests=_pci(data),
        requested_destination=_destination(asked) if asked else None,
        retry=_retry(retry) if retry else None,
        security_groups=[one.get("uuid") or one.get("name") for one in _listed(data.get("security_groups"))],
        instance_group=_made(_GROUP, group, rules=group.get("_rules") or {}) if group else None,
        force_hosts=_first(data.get("force_hosts")),
        force_nodes=_first(data.get("force_nodes")),
    )


def _image(image: Mapping[str, Any]) -> dict[str, Any]:
    return _made(_IMAGE, image, properties=_made(_PROPERTIES, _data(image.get("properties"))))


def _retry(retry: Mapping[str, Any]) -> dict[str, Any]:
    return _made(_RETRY, retry, hosts=[one.get("hypervisor_hostname") for one in _listed(retry.get("hosts"))])


def _destination(asked: Mapping[str, Any]) -> dict[str, Any]:
    set_ = {key: asked[key] for key in ("host", "node") if asked.get(key) is not None}
    if cell := _data(asked.get("cell")):
        set_["cell"] = _made(_CELL, cell)
    return _made(_DESTINATION, asked, **set_)


def _pci(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    if spec.get("pci_requests") is None:
        return None
    found = {"instance_uuid": spec.get("instance_uuid")} | _data(spec["pci_requests"])
    return _made(_PCI, found, requests=[_made(_PCI_REQUEST, one) for one in _objects(found.get("requests"))])


def _numa(spec: Mapping[str, Any]) -> dict[str, Any] | None:
    if spec.get("numa_topology") is None:
        return None
    found = {"instance_uuid": spec.get("instance_uuid")} | _data(spec["numa_topology"])
    cells = []
    for one in _objects(found.get("cells")):
        topology = _data(one.get("cpu_topology"))
        cells.append(_made(_NUMA_CELL, one, cpu_topology=_made(_CPU_TOPOLOGY, topology) if topology else None))
    return _made(_NUMA, found, cells=cells)


def _made(kind: _Payload, source: Mapping[str, Any], **more: object) -> dict[str, Any]:
    """A payload object."""
    return {
        OBJECT + "name": kind.name,
        OBJECT + "namespace": NAMESPACE,
        OBJECT + "version": kind.version,
        OBJECT + "data": {name: source.get(name) for name in (source if kind.fields is None else kind.fields)} | more,
    }


def _data(value: object) -> dict[str, Any]:
    """The fields of a serialised object; of anything else none."""
    data = value.get(OBJECT + "data") if isinstance(value, dict) else None
    return data if isinstance(data, dict) else {}


def _objects(value: object) -> list[dict[str, Any]]:
    return [_data(one) for one in value] if isinstance(value, list) else []


def _listed(value: object) -> list[dict[str, Any]]:
    """The members of a serialised list object."""
    return _objects(_data(value).get("objects"))


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) and value else None


class _Event(NamedTuple):
    """A notification that is to be published."""

    name: str
    at: float  # Unix time
    spec: object
    context: Mapping[str, Any]
    request_id: str


class NovaNotifier:
    """Publishes notifications to the topics of the settings; none: it does nothing.

    transport: of Nova's virtual host; its owner opens it. host: its name in that of the publisher.
    """

    def __init__(
        self,
        transport: RabbitTransport,
        settings: NotificationSettings,
        *,
        host: str,
        options: RabbitOptions,
        control_exchange: str,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self._transport = transport
        self._exchange = control_exchange
        self._publisher = f"{SOURCE}:{host}"
        self._keys = settings.keys
        self._queues = [topic_queue(options, control_exchange, key) for key in self._keys]
        self._clock = clock
        self._rng = rng
        self._waiting: asyncio.Queue[_Event] = asyncio.Queue(MAX_WAITING)

    def notify(self, call: Call, begun_at: float, *, placed: bool) -> None:
        """Have it published that a call was taken and, placed, that it has hosts. It waits for nothing, and drops what
        is too much. begun_at: Unix time.
        """
        if not self._keys:
            return
        told = _Event(START, begun_at, call.arguments.get("spec_obj"), call.context, call.request_id)
        for event in (told, told._replace(name=END, at=self._clock.time()))[: 1 + placed]:
            if self._waiting.full() or len(call.body) > MAX_BYTES:
                NOTIFICATIONS.labels("dropped").inc()
            else:
                self._waiting.put_nowait(event)

    async def run(self) -> None:
        """Publish until cancelled."""
        is_declared = False
        while True:
            event = await self._waiting.get()
            try:
                if not is_declared:  # as oslo.messaging does: nobody may listen yet
                    for queue in self._queues:
                        await self._transport.declare_external(queue)
                    is_declared = True
                body = self._body(event)
                for key in self._keys:
                    await self._transport.publish(Outgoing(exchange=self._exchange, routing_key=key, body=body))
            except BusError as error:
                NOTIFICATIONS.labels("failed").inc()
                log.warning("nova.notification_lost", code=error.code, reason=str(error), request_id=event.request_id)
            else:
                NOTIFICATIONS.labels("published").inc()

    def _body(self, event: _Event) -> bytes:
        return encode_notification(
            {
                "message_id": f"{self._rng.getrandbits(128):032x}",
                "publisher_id": self._publisher,
                "event_type": event.name,
                "priority": PRIORITY,
                "payload": payload_of(event.spec),
                "timestamp": str(datetime.fromtimestamp(event.at, UTC).replace(tzinfo=None)),
            },
            context={key: event.context[key] for key in CONTEXT if key in event.context},
            unique_id=f"{self._rng.getrandbits(128):032x}",
        )
