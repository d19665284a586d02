"""Ironic's REST API over HTTP: one request at a time, bounded, with Ironic's own words in every refusal."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec
from msgspec import Struct

from bus.clock import Clock
from bus.contracts.base import reason_of
from bus.faults import Fault
from bus.openstack import answers
from bus.openstack.keystone import KeystoneAuth, SignInUnavailable
from bus.openstack.rest import IRONIC_VERSION, api_root, auth_of, error_text, is_ironics, tls_of, version_advice
from bus.tracing.context import CURRENT
from compute_agent.driver import DriverBusy, DriverOutage, DriverUnavailable
from compute_agent.drivers.ironic.config import IronicConfig
from compute_agent.drivers.ironic.node import FIELDS, History, IronicNode, Page
from compute_agent.drivers.ironic.volume import Targets, VolumeTarget

T = TypeVar("T")

MAX_NODES = 1_000_000  # as ironic_sync.max_nodes; pages without an end would fill the memory
PAGE = 1000
DETAILED_PAGE = 100  # a node with all its fields may have tens of kB
MAX_FAILURES = 3  # of a node's history that a reason names
MAX_DIGITS = 6
MAX_BODY = 32 * 2**20
# Servers close a connection that was idle for five seconds; a request that crosses with that would fail a build.
KEEPALIVE_S = 2.0
BUSY = frozenset({429, 503})  # no free conductor worker, or a proxy's limit
PASSING = frozenset({401, 403, 406, 408, 429})  # credentials, settings and load are not the build's fault


class Refused(Struct, frozen=True):
    """Ironic turned a change down."""

    status: int
    text: str  # Ironic's own words

    @property
    def is_conflict(self) -> bool:
        """Whether the node is locked or taken just now: another read shows which."""
        return self.status == httpx.codes.CONFLICT

    def __str__(self) -> str:
        return f"Ironic answered {self.status}{': ' if self.text else ''}{self.text}"


class IronicApi:
    """The used part of the API. A fault that time or an operator may heal is DriverUnavailable."""

    def __init__(
        self, config: IronicConfig, *, clock: Clock, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """Raises SettingsError: the login or the certificates cannot be used."""
        self._config = config
        self._in_flight = asyncio.Semaphore(config.requests_in_flight)
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._verify = tls_of(verify=config.verify_tls, ca_file=config.ca_file, setting="compute.ironic.ca_file")
        self._auth = auth_of(
            config.keystone,
            username=config.username,
            password=config.password,
            clock=clock,
            timeout_s=config.request_timeout_s,
            verify=self._verify,
            setting="compute.ironic.keystone",
        )

    def open(self) -> None:
        """Make the HTTP client; no request is sent yet."""
        if self._client is None:
            headers = {IRONIC_VERSION: self._config.microversion}
            if self._config.token:
                headers["X-Auth-Token"] = self._config.token
            self._client = httpx.AsyncClient(
                base_url=api_root(self._config.url),
                headers=headers,
                auth=self._auth,
                timeout=self._config.request_timeout_s,
                limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
                transport=self._transport,
                verify=self._verify,
                trust_env=False,  # a proxy meant for the world outside must not stand between us and Ironic
            )

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None
        if isinstance(self._auth, KeystoneAuth):
            await self._auth.aclose()

    async def nodes(self, **filters: str) -> builtins.list[IronicNode]:
        """All nodes (that these filters of Ironic's name), in its order; one that cannot be read is left out. Raises
        DriverUnavailable, also where no node of a page can be read.
        """
        found: builtins.list[IronicNode] = []
        fields = ",".join((FIELDS, *(name for name, wanted in self._config.more_fields.items() if wanted)))
        params = {"fields": fields, "limit": str(PAGE), **filters}
        while True:  # a page may be smaller than is asked for: `[api] max_limit` of ironic.conf
            page = _parse(await self._call("GET", "/v1/nodes", params=params), Page)
            nodes = page.readable()
            found.extend(nodes)
            if page.next is None or not page.nodes:
                return found
            if not nodes:
                raise DriverUnavailable("Ironic's answer is not understood: no node of a page can be read")
            _check_number(found)
            params["marker"] = nodes[-1].uuid

    async def node(self, ident: str) -> IronicNode | None:
        """One node; None: Ironic answers that there is none."""
        answer = await self._call("GET", f"/v1/nodes/{ident}")
        return None if answer.status_code == httpx.codes.NOT_FOUND else _parse(answer, IronicNode)

    async def raw_node(self, ident: str) -> dict[str, Any] | None:
        """One node with all its fields, as Ironic answers it; by uuid or name."""
        answer = await self._call("GET", f"/v1/nodes/{quote(ident, safe='')}")
        return None if answer.status_code == httpx.codes.NOT_FOUND else _parse(answer, dict[str, Any])

    async def raw_nodes(self) -> builtins.list[dict[str, Any]]:
        """All nodes with all their fields, in Ironic's order."""
        found: builtins.list[dict[str, Any]] = []
        params = {"detail": "true", "limit": str(DETAILED_PAGE)}
        while True:
            page = _parse(await self._call("GET", "/v1/nodes", params=params), dict[str, Any])
            nodes = page.get("nodes") or []
            found.extend(nodes)
            if not page.get("next") or not nodes:
                return found
            _check_number(found)
            params["marker"] = str(nodes[-1]["uuid"])

    async def set_maintenance(self, ident: str, *, on: bool, reason: str = "") -> Refused | None:
        """Set maintenance with a reason, or take it away."""
        body = {"reason": reason} if on else None
        return await self._change("PUT" if on else "DELETE", f"/v1/nodes/{quote(ident, safe='')}/maintenance", body)

    async def holder(self, instance: str) -> IronicNode | None:
        """The node that carries this instance, by Ironic's record; Ironic lets only one. With all its fields."""
        held = await self.nodes(instance_uuid=instance)
        found = next((node.uuid for node in held if node.instance == instance), None)
        node = None if found is None else await self.node(found)
        # Between the two reads it may have let go: then it is free, and not another's that carries our instance.
        return node if node is not None and node.instance == instance else None

    async def refusals(self, ident: str, interfaces: builtins.list[str]) -> builtins.list[str]:
        """Why these interfaces of the node would not deploy it, in Ironic's words; none: they would."""
        answer = await self._call("GET", f"/v1/nodes/{ident}/validate")
        found = _parse(answer, dict[str, Any])
        reasons = {name: found.get(name) for name in interfaces}
        # `result: null` means that the interface has no result.
        return [
            f"{name}: {result.get('reason') or ''!s}"
            for name, result in reasons.items()
            if isinstance(result, dict) and result.get("result") is False
        ]

    async def failures(self, ident: str, since: float) -> builtins.list[str]:
        """The newest errors in Ironic's history of the node since then (seconds since the epoch), oldest first. None
        where Ironic keeps no history, or is away: it decides nothing.
        """
        try:
            answer = await self._call("GET", f"/v1/nodes/{ident}/history", params={"detail": "true"})
            events = _parse(answer, History).history
        except DriverUnavailable:
            return []
        errors = [event for event in events if event.severity == "ERROR" and event.since_epoch >= since]
        newest = sorted(errors, key=lambda event: event.since_epoch)[-MAX_FAILURES:]
        return [f"{event.created_at} {event.event_type}: {' '.join(event.event.split())}" for event in newest]

    async def patch(self, ident: str, operations: builtins.list[dict[str, Any]]) -> Refused | None:
        """Change fields of the node, all or none."""
        return await self._change("PATCH", f"/v1/nodes/{ident}", operations)

    async def provision(self, ident: str, target: str, **more: Any) -> Refused | None:
        """Ask for a provision state; the node goes there by itself."""
        return await self._change("PUT", f"/v1/nodes/{ident}/states/provision", {"target": target, **more})

    async def power(self, ident: str, target: str) -> Refused | None:
        """Ask for a power state: `power on`, `power off`, `rebooting`, or `soft ...`."""
        return await self._change("PUT", f"/v1/nodes/{ident}/states/power", {"target": target})

    async def attach_vif(self, ident: str, vif: str) -> Refused | None:
        """Attach a network port; one that is attached already is fine."""
        return await self._change("POST", f"/v1/nodes/{ident}/vifs", {"id": vif})

    async def vifs(self, ident: str) -> builtins.list[str]:
        """The network ports that are attached."""
        answer = await self._call("GET", f"/v1/nodes/{ident}/vifs")
        entries = _parse(answer, dict[str, Any]).get("vifs")
        return [str(entry["id"]) for entry in entries if "id" in entry] if isinstance(entries, builtins.list) else []

    async def detach_vif(self, ident: str, vif: str) -> Refused | None:
        """Detach a network port."""
        return await self._change("DELETE", f"/v1/nodes/{ident}/vifs/{vif}")

    async def volume_targets(self, ident: str) -> builtins.list[VolumeTarget]:
        """The volume targets of a node."""
        answer = await self._call("GET", "/v1/volume/targets", params={"node": ident, "detail": "true"})
        return _parse(answer, Targets).targets

    async def add_volume_target(self, body: dict[str, Any]) -> Refused | None:
        """Make a volume a target of its node."""
        return await self._change("POST", "/v1/volume/targets", body)

    async def remove_volume_target(self, target: str) -> Refused | None:
        """Remove a target; Ironic refuses while its node is powered on."""
        refused = await self._change("DELETE", f"/v1/volume/targets/{target}")
        return None if refused is not None and refused.status == httpx.codes.NOT_FOUND else refused

    async def _change(self, method: str, path: str, body: Any = None) -> Refused | None:
        """A request that changes something."""
        answer = await whole(self._call(method, path, body))
        return Refused(answer.status_code, error_text(answer.content)) if answer.is_error else None

    async def _call(
        self, method: str, path: str, body: Any = None, *, params: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """One request. A fault that time or an operator may heal is DriverUnavailable; other answers are returned."""
        if self._client is None:
            raise DriverUnavailable("the driver is closed")
        scope = CURRENT.get()
        span = None if scope is None else scope.start_span(f"ironic {method}", **{"url.path": path})
        headers = None if span is None else {"traceparent": span.context.header}
        problem = "driver.unavailable"
        try:
            async with self._in_flight:
                answer = await answers.request(
                    self._client,
                    method,
                    path,
                    max_bytes=MAX_BODY,
                    json=body,
                    params=params,
                    headers=headers,
                )
            problem = str(answer.status_code) if answer.is_error else ""
        except answers.AnswerTooLarge as error:
            raise DriverUnavailable(f"Ironic: {error}") from error
        except (httpx.HTTPError, TimeoutError) as error:
            raise DriverOutage(f"Ironic: {type(error).__name__}") from error
        except SignInUnavailable as fault:
            raise DriverOutage(fault.reason) from fault
        except Fault as fault:  # our credentials: waiting does not help
            raise DriverUnavailable(fault.reason) from fault
        finally:
            if span is not None:
                span.end(problem)
        return _taken(answer, path)


async def whole(request: Coroutine[Any, Any, httpx.Response]) -> httpx.Response:
    """The answer to a request that changes something. It is never left half-way: cancelled, it could land after its
    undoing.
    """
    call = asyncio.ensure_future(request)
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait({call})  # bounded by the request's own timeout
        if not call.cancelled():
            call.exception()
        raise


def _check_number(nodes: Sequence[Any]) -> None:
    """A part of the nodes would look like all of them. Raises DriverUnavailable."""
    if len(nodes) >= MAX_NODES:
        raise DriverUnavailable(f"Ironic lists more than {MAX_NODES} nodes")


def _taken(answer: httpx.Response, path: str) -> httpx.Response:
    """The answer, where it is the caller's. Raises DriverUnavailable: time or an operator may heal it."""
    if answer.status_code == httpx.codes.NOT_ACCEPTABLE:
        raise DriverUnavailable(version_advice(answer.headers, "compute.ironic.microversion"))
    if answer.status_code in BUSY:
        refused = Refused(answer.status_code, error_text(answer.content))
        raise DriverBusy(str(refused), retry_after_s=_retry_after_s(answer))
    if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
        raise DriverOutage(str(Refused(answer.status_code, error_text(answer.content))))
    if answer.status_code == httpx.codes.NOT_FOUND and not is_ironics(answer.headers, answer.content):
        raise DriverOutage(f"{path}: the 404 is not Ironic's")  # a proxy's, which proves no node gone
    if answer.status_code in PASSING:
        raise DriverUnavailable(str(Refused(answer.status_code, error_text(answer.content))))
    return answer


def _retry_after_s(answer: httpx.Response) -> float:
    """The answer's `Retry-After`, where that is a number of seconds."""
    text = answer.headers.get("Retry-After", "")
    return float(text) if text.isascii() and text.isdigit() and len(text) < MAX_DIGITS else 0.0


def _parse(answer: httpx.Response, kind: type[T]) -> T:
    if answer.is_error:
        raise DriverUnavailable(str(Refused(answer.status_code, error_text(answer.content))))
    try:
        return msgspec.json.decode(answer.content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DriverUnavailable(f"Ironic's answer is not understood: {reason_of(error)}") from error
