"""Ironic over HTTP."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import msgspec

from bus.contracts.base import reason_of
from bus.openstack import answers
from bus.openstack.keystone import KeystoneAuth, SignInRefused, SignInUnavailable, unanswered
from bus.openstack.rest import (
    IRONIC_VERSION,
    api_root,
    error_text,
    is_ironics,
    newest_version,
    parse_version,
    version_advice,
)
from bus.tracing.context import CURRENT
from ironic_sync.domain.node import Allocation, Node, Unreadable, parse_node
from ironic_sync.source.port import IronicRefused, IronicUnavailable

MAX_NODE_BYTES = 4 * 1024 * 1024  # driver_info, properties and extra are free-form
MAX_PAGE_BYTES = 64 * 1024 * 1024
MAX_LISTED = 4_000_000  # nodes of one list, whatever the size of its pages
OLDEST = (1, 52)  # has all fields that are read but `parent_node`, and no child nodes either
# `fields` keeps a page at 600 bytes a node. Ironic refuses updated_at there, and fails on allocation_uuid.
FIELDS = "uuid,provision_state,power_state,maintenance,instance_uuid,resource_class,traits"

# Answers that another try may change. 409 is not among them: no read is refused for a lock.
BUSY = frozenset({408, 425, 429})


class IronicRestClient:
    """Ironic's REST API. Connections are kept and bounded; every call is bounded in time and size."""

    def __init__(
        self,
        url: str,
        *,
        microversion: str,
        timeout_s: float,
        list_timeout_s: float,
        page_size: int,
        connections: int,
        auth: httpx.Auth | None = None,
        token: str = "",
        verify: ssl.SSLContext | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        headers = {"Accept": "application/json"}
        if token:
            headers["X-Auth-Token"] = token
        self._auth = auth
        self._wanted_version = self._version = microversion
        self._timeout_s = timeout_s
        self._list_timeout_s = list_timeout_s
        self._page_size = page_size
        self._client = httpx.AsyncClient(
            base_url=api_root(url),
            headers=headers,
            auth=auth,
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
            verify=verify,
            transport=transport,
            trust_env=False,  # a proxy meant for the world outside must not stand between us and Ironic
        )

    async def get_node(self, uuid: str) -> Node | Unreadable | None:
        """One node; None: Ironic itself answers that it does not exist."""
        raw = await self._get(f"/v1/nodes/{uuid}", {}, self._timeout_s, MAX_NODE_BYTES)
        if raw is None:
            return None
        node = parse_node(raw)
        if node.uuid != uuid:
            return Unreadable(uuid=uuid, reason="the answer is about another node, or about none")
        return node

    async def list_nodes(self) -> AsyncIterator[Sequence[Node | Unreadable]]:
        """All nodes, by `next` links. Raises IronicUnavailable, or IronicRefused: the answer is no list of nodes, or
        has no end.
        """
        # Of a link only its marker is used, so that it cannot lead elsewhere.
        params = {"fields": FIELDS, "limit": str(self._page_size)}
        self._version = self._wanted_version  # Ironic may have been upgraded
        listed, before = 0, list[str]()
        while listed <= MAX_LISTED:
            raw = await self._get("/v1/nodes", params, self._list_timeout_s, MAX_PAGE_BYTES)
            if raw is None and before:
                params["marker"] = before.pop()  # the node of the marker was deleted meanwhile: from the one before it
                continue
            if raw is None or not isinstance(raw.get("nodes"), list):
                raise IronicRefused("the node list has no nodes", code="ironic.not_a_list")
            nodes = [parse_node(node) for node in raw["nodes"]]
            yield nodes
            marker = _marker(raw.get("next"))
            if marker is None:
                return
            if marker == params.get("marker") or not nodes:
                raise IronicRefused("the node list goes round in circles", code="ironic.endless_list")
            before = [node.uuid for node in nodes if node.uuid not in (None, marker)]
            params["marker"], listed = marker, listed + len(nodes)
        raise IronicRefused(f"more than {MAX_LISTED} nodes", code="ironic.endless_list")

    async def get_allocation(self, uuid: str) -> Allocation | None:
        """One of Ironic's allocations; None: there is none. Raises IronicUnavailable or IronicRefused."""
        raw = await self._get(f"/v1/allocations/{uuid}", {}, self._timeout_s, MAX_NODE_BYTES)
        if raw is None:
            return None
        try:
            return msgspec.convert(raw, Allocation)
        except msgspec.ValidationError as error:
            raise IronicRefused(reason_of(error), code="ironic.not_an_allocation") from error

    async def ping(self) -> None:
        """Ask for one node's uuid."""
        await self._get("/v1/nodes", {"fields": "uuid", "limit": "1"}, self._timeout_s, MAX_NODE_BYTES)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
        if isinstance(self._auth, KeystoneAuth):
            await self._auth.aclose()

    async def _get(self, path: str, params: dict[str, str], timeout_s: float, max_bytes: int) -> dict[str, Any] | None:
        """The JSON object of a 200; None for a 404 that Ironic itself gave."""
        scope = CURRENT.get()
        span = None if scope is None else scope.start_span("ironic GET", **{"url.path": path})
        headers = {} if span is None else {"traceparent": span.context.header}
        problem = IronicUnavailable.code
        try:
            while True:
                headers[IRONIC_VERSION] = asked = self._version
                answer = await answers.request(
                    self._client, "GET", path, timeout_s=timeout_s, max_bytes=max_bytes, params=params, headers=headers
                )
                newest = newest_version(answer.headers)
                if answer.status_code != httpx.codes.NOT_ACCEPTABLE or not OLDEST <= newest < parse_version(asked):
                    break
                self._version = f"{newest[0]}.{newest[1]}"  # lower each time
            problem = str(answer.status_code) if answer.is_error else ""
        except SignInUnavailable as error:
            raise IronicUnavailable(error.reason, code=error.code) from error
        except SignInRefused as error:
            raise IronicRefused(error.reason, code=error.code) from error
        except answers.AnswerTooLarge as error:
            raise IronicRefused(str(error), code="ironic.too_large") from error
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise IronicUnavailable(f"{path}: {unanswered(error, timeout_s)}") from error
        finally:
            if span is not None:
                span.end(problem)
        if answer.status_code == 200:
            return _decode(path, answer.content)
        if answer.status_code == 404 and is_ironics(answer.headers, answer.content):
            return None
        if answer.status_code >= 500 or answer.status_code in BUSY:
            raise IronicUnavailable(f"{path}: HTTP {answer.status_code}")
        if answer.status_code == httpx.codes.NOT_ACCEPTABLE:
            raise IronicRefused(version_advice(answer.headers, "ironic_sync.microversion"), code="ironic.microversion")
        text = error_text(answer.content)
        reason = f"{path}: HTTP {answer.status_code}{': ' if text else ''}{text}"
        raise IronicRefused(reason, code=f"ironic.http_{answer.status_code}")


def _decode(path: str, body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise IronicUnavailable(f"{path}: the answer is no JSON object", code="ironic.not_json") from error


def _marker(link: object) -> str | None:
    if not isinstance(link, str) or not link:
        return None
    try:
        markers = parse_qs(urlsplit(link).query).get("marker")
    except ValueError as error:
        raise IronicRefused("the node list has a next link that is none", code="ironic.not_a_list") from error
    return markers[-1] if markers else None
