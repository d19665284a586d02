"""Nova over HTTP: what a scheduler reads of it. Everything that comes back is hostile until it is parsed.

A row that cannot be read is left out and counted (`metrics.UNREADABLE`); an answer that is no list is a refusal.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

import httpx
import msgspec
from msgspec import Meta as Bound
from msgspec import Struct

from bus.clock import Clock
from bus.contracts.base import Uuid
from bus.faults import Fault, Transient
from bus.openstack import answers
from bus.openstack.keystone import KeystoneAuth, SignInRefused, SignInUnavailable, checked_address, unanswered
from bus.openstack.rest import auth_of, error_text, tls_of
from bus.service.settings import SettingsError, hide_password
from nova_scheduler.cloud.api_config import NovaApiConfig
from nova_scheduler.cloud.state import ComputeNode, NovaAggregate, NovaService
from nova_scheduler.metrics import UNREADABLE

T = TypeVar("T")
U = TypeVar("U")

VERSION = "OpenStack-API-Version"
NEWEST = (2, 104)  # that this module was written for
OLDEST = (2, 88)
# Newer lists of compute nodes have no `cpu_info`, and for each row of them some releases of Nova ask the nova-compute
# for its uptime.
OF_NODES = (2, 87)
MAX_PAGE_BYTES = 64 * 2**20
MAX_ROWS = 1_000_000  # of one list
MAX_DEPTH = 4  # of a node's cpu_info that is read
MAX_VALUES = 64
MAX_VALUE = 8_192  # characters: a processor has some hundred features
FOR_TOKEN = 0.5  # of a request's time, for a sign-in that comes first: a silent Keystone is told as such
BUSY = frozenset({408, 413, 425, 429})  # Nova's rate limits were 413
SERVICE = "nova-compute"
_VERSION = re.compile(r"^(\d{1,2})\.(\d{1,5})$")

Name = Annotated[str, Bound(min_length=1, max_length=255)]
Text = Annotated[str, Bound(max_length=255)]


class NovaUnavailable(Transient):
    """Nova's API cannot be reached, is overloaded or answers with a server error: try again later."""

    code = "nova.unavailable"


class NovaRefused(Fault):
    """Nova answers, but not the request: wrong credentials, version or address. For an operator."""

    code = "nova.refused"


class NovaApi(Protocol):
    """Reads Nova. Every call is bounded in time and size. Raises NovaUnavailable, NovaRefused."""

    async def services(self) -> list[NovaService]:
        """All nova-computes, of all cells."""

    async def nodes(self) -> list[tuple[ComputeNode, NovaService]]:
        """All compute nodes that have a nova-compute, each with its state."""

    async def node(self, uuid: str) -> tuple[ComputeNode, NovaService] | None:
        """One compute node; None: Nova has none with this uuid."""

    async def aggregates(self) -> list[NovaAggregate]:
        """All host aggregates. Of one that cannot be read there are the uuid and the hosts."""

    async def task_of(self, instance: str) -> str | None:
        """The task state of a server, "" for none; None: Nova has no such server."""


class _Service(Struct, frozen=True):
    host: Name
    binary: str = ""
    status: str = ""
    state: str = ""
    disabled_reason: str | None = None
    forced_down: bool = False

    def as_state(self) -> NovaService:
        return NovaService(
            host=self.host,
            is_up=self.state == "up" and not self.forced_down,
            is_disabled=self.status == "disabled",
            reason=self.disabled_reason or ("its cell is out of reach" if self.status == "UNKNOWN" else ""),
        )


class _UnreadService(Struct, frozen=True):
    host: Name
    binary: str

    def as_state(self) -> NovaService:
        return NovaService(host=self.host, is_up=False, is_read=False)


class _ServiceOfNode(Struct, frozen=True):
    host: Name
    disabled_reason: str | None = None


class _Node(Struct, frozen=True):
    id: Uuid
    hypervisor_hostname: Name
    service: _ServiceOfNode
    state: str = ""
    status: str = ""
    hypervisor_type: str | None = None
    hypervisor_version: int | None = None
    host_ip: str | None = None
    cpu_info: Any = None


class _Server(Struct, frozen=True):
    id: Uuid
    task_state: str | msgspec.UnsetType | None = msgspec.field(name="OS-EXT-STS:task_state", default=msgspec.UNSET)


class _UnreadAggregate(Struct, frozen=True):
    uuid: Uuid
    hosts: tuple[Name, ...] | None

    def as_state(self) -> NovaAggregate:
        return NovaAggregate(uuid=self.uuid, name=self.uuid, hosts=self.hosts or (), is_read=False)


class AggregateRow(Struct, frozen=True):
    """An aggregate as Nova's API and its casts have it: in both the fields have the same names."""

    uuid: Uuid
    name: Name
    metadata: dict[Text, Text] | None = None
    hosts: tuple[Name, ...] | None = None

    def as_state(self) -> NovaAggregate:
        """The same in the terms of `state`."""
        return NovaAggregate(uuid=self.uuid, name=self.name, metadata=self.metadata or {}, hosts=self.hosts or ())


class NovaRest:
    """The adapter for Nova's REST API. Connections are kept and bounded."""

    def __init__(
        self,
        config: NovaApiConfig,
        *,
        clock: Clock,
        transport: httpx.AsyncBaseTransport | None = None,
        setting: str,
        on_version: Callable[[tuple[int, int]], None] | None = None,
    ) -> None:
        """setting: where the settings have these. on_version: takes the server's newest microversion. Raises
        SettingsError: address, token, login or certificates cannot be used.
        """
        _check_token(config.token, setting=f"{setting}.token")
        verify = tls_of(verify=config.verify_tls, ca_file=config.ca_file, setting=f"{setting}.ca_file")
        self._auth = auth_of(
            config.keystone,
            username="",
            password="",
            clock=clock,
            timeout_s=config.request_timeout_s * FOR_TOKEN,
            verify=verify,
            setting=f"{setting}.keystone",
        )
        self._timeout_s = config.request_timeout_s
        self._page_size = config.page_size
        self.url = checked_address(config.url, setting=f"{setting}.url")
        self._version: tuple[int, int] | None = None
        self._on_version = on_version
        self._client = httpx.AsyncClient(
            headers={"Accept": "application/json", **({"X-Auth-Token": config.token} if config.token else {})},
            auth=self._auth,
            timeout=config.request_timeout_s,
            limits=httpx.Limits(max_connections=8, max_keepalive_connections=8),
            verify=verify,
            transport=transport,
            trust_env=False,  # a proxy meant for the world outside must not stand between us and Nova
        )

    async def services(self) -> list[NovaService]:
        """All nova-computes, of all cells; one whose cell Nova cannot reach is not up. Of one that cannot be read there
        is the host.
        """
        raw = await self.get("/os-services", {"binary": SERVICE})
        return [
            one.as_state() for one in self._rows(raw, "services", _Service, _UnreadService) if one.binary == SERVICE
        ]

    async def nodes(self) -> list[tuple[ComputeNode, NovaService]]:
        """All compute nodes that have a nova-compute, each with its state."""
        return [
            node_of(one)
            async for page in self.pages("/os-hypervisors/detail", "hypervisors", version=OF_NODES)
            for one in self._rows(page, "hypervisors", _Node)
        ]

    async def node(self, uuid: str) -> tuple[ComputeNode, NovaService] | None:
        """One compute node; None: Nova has none with this uuid."""
        raw = await self.get(f"/os-hypervisors/{uuid}", version=OF_NODES, or_none=True)
        rows = [] if raw is None else self._rows({"hypervisors": [raw.get("hypervisor")]}, "hypervisors", _Node)
        return node_of(rows[0]) if rows and rows[0].id == uuid else None

    async def aggregates(self) -> list[NovaAggregate]:
        """All host aggregates. Of one that cannot be read there are the uuid and the hosts. Raises NovaUnavailable,
        NovaRefused: one of them does not tell these either.
        """
        raw = await self.get("/os-aggregates")
        rows = self._rows(raw, "aggregates", AggregateRow, _UnreadAggregate)
        if len(rows) < len(raw["aggregates"]):
            raise NovaRefused("of an aggregate not even the hosts can be read")
        return [one.as_state() for one in rows]

    async def task_of(self, instance: str) -> str | None:
        """The task state of a server, "" for none; None: Nova has no such server. Raises NovaUnavailable, NovaRefused.

        It is listed among those of all projects: shown by itself, one that this user may not see is not found either.
        """
        asked = {"all_tenants": "True", "uuid": instance, "limit": "1"}
        raw = await self.get("/servers/detail", asked)
        rows = self._rows(raw, "servers", _Server)
        if len(rows) < len(raw["servers"]) or any(one.id != instance for one in rows):
            raise NovaRefused("a server cannot be read, or Nova's policy ignores the filter by which it is asked for")
        if not rows:
            return None
        if rows[0].task_state is msgspec.UNSET:  # so it is while Nova cannot reach the cell
            raise NovaUnavailable("Nova does not tell the task of a server")
        return rows[0].task_state or ""

    async def pages(
        self,
        path: str,
        name: str,
        params: Mapping[str, str] | None = None,
        *,
        version: tuple[int, int] | None = None,
        marker: str | None = "id",
    ) -> AsyncIterator[dict[str, Any]]:
        """A list page by page, until a page is empty: Nova leaves rows out (compute nodes of deleted services), so a
        page that is not full is not the last. marker: the field of the last row; None: by offset. Raises
        NovaUnavailable, NovaRefused.
        """
        asked = {**(params or {}), "limit": str(self._page_size)}
        seen = 0
        while seen < MAX_ROWS:
            page = await self.get(path, asked, version=version)
            rows = page.get(name)
            if not isinstance(rows, list):
                raise NovaRefused(f"{path}: the answer has no {name}", code="nova.not_a_list")
            if not rows:
                return
            yield page
            seen += len(rows)
            if marker is None:
                asked["offset"] = str(seen)
                continue
            last = rows[-1].get(marker) if isinstance(rows[-1], dict) else None
            if not isinstance(last, str) or last == asked.get("marker"):
                raise NovaRefused(f"{path}: the list goes round in circles", code="nova.endless_list")
            asked["marker"] = last
        raise NovaRefused(f"{path}: more than {MAX_ROWS} rows", code="nova.endless_list")

    async def version(self) -> tuple[int, int]:
        """The microversion that is used: the newest of this module's that the server has. Raises NovaUnavailable,
        NovaRefused.
        """
        if self._version is None:
            raw = await self._decoded(self.url + "/", {}, "")
            found = raw.get("version") if isinstance(raw, dict) else None
            text = found.get("version") if isinstance(found, dict) else None
            digits = _VERSION.match(text) if isinstance(text, str) else None
            if digits is None:
                raise NovaRefused(
                    f"{hide_password(self.url)} does not answer as Nova's API v2.1 does", code="nova.not_nova"
                )
            newest = (int(digits[1]), int(digits[2]))
            if newest < OLDEST:
                reason = f"Nova has microversions up to {text}, and {_dotted(OLDEST)} is needed"
                raise NovaRefused(reason, code="nova.microversion")
            self._version = min(newest, NEWEST)
            if self._on_version is not None:
                self._on_version(newest)
        return self._version

    async def get(
        self,
        path: str,
        params: Mapping[str, str] | None = None,
        *,
        version: tuple[int, int] | None = None,
        or_none: bool = False,
    ) -> Any:
        """The JSON object of one answer. or_none: None for a 404. version: instead of the negotiated one. Raises
        NovaUnavailable, NovaRefused.
        """
        used = await self.version() if version is None else version
        raw = await self._decoded(self.url + path, params or {}, f"compute {_dotted(used)}", or_none=or_none)
        if raw is None and or_none:
            return None
        if not isinstance(raw, dict):
            raise NovaRefused(f"{path}: the answer is no JSON object", code="nova.not_json")
        return raw

    async def document(self, url: str) -> Any:
        """The JSON of another service that takes our token. Raises NovaUnavailable, NovaRefused."""
        return await self._decoded(url, {}, "")

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
        if isinstance(self._auth, KeystoneAuth):
            await self._auth.aclose()

    def _rows(self, raw: Mapping[str, Any], name: str, kind: type[T], least: type[U] | None = None) -> list[T | U]:
        """The rows of a list. least: what is read of one that cannot be read whole."""
        rows = raw.get(name)
        if not isinstance(rows, list):
            raise NovaRefused(f"the answer has no {name}", code="nova.not_a_list")
        found: list[T | U] = []
        for row in rows[:MAX_ROWS]:
            try:
                found.append(msgspec.convert(row, kind))
            except msgspec.ValidationError:
                UNREADABLE.labels(name).inc()
                if least is not None:
                    with contextlib.suppress(msgspec.ValidationError):
                        found.append(msgspec.convert(row, least))
        return found

    async def _decoded(self, url: str, params: Mapping[str, str], version: str, *, or_none: bool = False) -> Any:
        shown = hide_password(url)
        try:
            answer = await answers.request(
                self._client,
                "GET",
                url,
                max_bytes=MAX_PAGE_BYTES,
                params=params,
                headers={VERSION: version} if version else {},
            )
        except SignInUnavailable as error:
            raise NovaUnavailable(error.reason, code=error.code) from error
        except SignInRefused as error:
            raise NovaRefused(error.reason, code=error.code) from error
        except answers.AnswerTooLarge as error:
            raise NovaRefused(f"{shown}: {error}", code="nova.too_large") from error
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise NovaUnavailable(f"{shown}: {unanswered(error, self._timeout_s)}") from error
        if answer.status_code == httpx.codes.NOT_FOUND and or_none:
            return None
        if answer.status_code >= 500 or answer.status_code in BUSY:
            raise NovaUnavailable(f"{shown}: HTTP {answer.status_code}")
        if answer.status_code == httpx.codes.NOT_ACCEPTABLE:
            self._version = None  # another Nova answers than the one that named its versions: older, or one of two
        if answer.status_code != httpx.codes.OK:
            text = error_text(answer.content)
            reason = f"{shown}: HTTP {answer.status_code}{': ' if text else ''}{text}"
            raise NovaRefused(reason, code=f"nova.http_{answer.status_code}")
        try:
            return msgspec.json.decode(answer.content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise NovaUnavailable(f"{shown}: the answer is not JSON", code="nova.not_json") from error


def _check_token(token: str, *, setting: str) -> None:
    """Raises SettingsError: no header may hold it."""
    if not (token.isascii() and token.isprintable()):
        raise SettingsError(setting, f"{setting} has other characters than a token may have")


def node_of(one: _Node) -> tuple[ComputeNode, NovaService]:
    """A row of Nova's list of hypervisors as a compute node, and the state of its service."""
    node = ComputeNode(
        uuid=one.id,
        host=one.service.host,
        nodename=one.hypervisor_hostname,
        hypervisor_type=one.hypervisor_type or "",
        hypervisor_version=one.hypervisor_version or 0,
        host_ip=one.host_ip or "",
        cpu_info=flattened(one.cpu_info),
    )
    service = NovaService(
        host=one.service.host,
        is_up=one.state == "up",
        is_disabled=one.status == "disabled",
        reason=one.service.disabled_reason or "",
    )
    return node, service


def flattened(tree: object) -> dict[str, str]:
    """The values of a tree by path ("topology:cores"), each as Nova's ComputeCapabilitiesFilter compares it."""
    found: dict[str, str] = {}
    level: Sequence[tuple[str, object]] = [("", tree)]
    for _ in range(MAX_DEPTH):
        below: list[tuple[str, object]] = []
        for path, value in level:
            if isinstance(value, dict):
                below += [(f"{path}:{key}" if path else str(key), inner) for key, inner in value.items()][:MAX_VALUES]
            elif path and value is not None and len(found) < MAX_VALUES:
                found[path] = str(value)[:MAX_VALUE]
        level = below
    return found


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
