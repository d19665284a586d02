"""The clients of `/api/v1` over httpx: `Client` waits, `AsyncClient` awaits. Each operation is a method of both."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from berth.client.answers import EVENT_STREAM, JSON, PROBLEM_JSON, ApiAnswer
from berth.client.call import ApiCall, Feed
from berth.client.event_feed import Following
from berth.client.faults import ApiAddressInvalid, ApiProblem, ApiTimeout, ApiUnavailable
from berth.client.operations import Operations
from bus.faults import Fault

A = TypeVar("A")

# Of the whole answer. The plan of a drain, the longest, takes the server 20 s at most.
TIMEOUT_S = 30.0
CONNECT_TIMEOUT_S = 5.0
# A stream says something every 15 s, if only that nothing happens.
SILENCE_S = 45.0
MAX_URL = 2_000
_TOKEN_CHARACTERS = frozenset(map(chr, range(0x21, 0x7F)))


def checked_url(url: str, *, insecure: bool) -> str:
    """The address without a slash at its end. Raises ApiAddressInvalid: it is none, or a token would cross a network in
    the clear (plain http beyond this computer, unless `insecure`).
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ApiAddressInvalid("this is no address") from None
    host = parts.hostname or ""
    if len(url) > MAX_URL or not host or port == 0 or parts.scheme not in ("http", "https") or not url.isprintable():
        raise ApiAddressInvalid("an address is http://HOST:PORT or https://HOST, with a path before /api/v1 if need be")
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise ApiAddressInvalid("an address has no login, no parameters and no fragment: a token is given apart")
    if parts.scheme == "http" and not insecure and not is_loopback(host):
        raise ApiAddressInvalid(
            f"http://{host} would carry the token in the clear: use https, or --insecure", code="api.plain_http"
        )
    return url.rstrip("/")


def is_loopback(host: str) -> bool:
    """Whether a host is this computer, by its address or as `localhost`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Connection(Operations):
    """What both clients have: where they call, and as whom. No proxy, login or certificate of the environment counts:
    the token goes to the named address alone.
    """

    def __init__(
        self, url: str, token: str = "", *, timeout_s: float = TIMEOUT_S, ca_file: str = "", insecure: bool = False
    ) -> None:
        """timeout_s: of one whole answer. ca_file: the certificates to trust, instead of those that httpx comes with.
        insecure: plain http beyond this computer. Raises ApiAddressInvalid.
        """
        self.url = checked_url(url, insecure=insecure)
        if not _TOKEN_CHARACTERS.issuperset(token):
            raise ApiAddressInvalid("the token has characters that no token has", code="api.token")
        self._headers = {"accept": f"{JSON}, {PROBLEM_JSON}, {EVENT_STREAM}", "accept-encoding": "identity"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s
        self._options: dict[str, Any] = {
            "verify": trust(self.url, ca_file),
            "trust_env": False,
            "follow_redirects": False,
            "timeout": httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
        }

    def _request(self, http: httpx.Client | httpx.AsyncClient, call: ApiCall[Any]) -> httpx.Request:
        content = call.content()
        headers = self._headers if content is None else {**self._headers, "content-type": JSON}
        target = self.url + call.target()
        request = http.build_request(
            call.method, target, params=call.parameters() or None, content=content, headers=headers
        )
        if isinstance(call, Feed):
            request.extensions["timeout"] = httpx.Timeout(SILENCE_S, connect=CONNECT_TIMEOUT_S).as_dict()
        return request

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Raises ApiTimeout and ApiUnavailable for what httpx raises."""
        try:
            yield
        except httpx.TimeoutException as fault:
            if isinstance(fault, httpx.ConnectTimeout):
                raise ApiUnavailable(f"{self.url} does not answer") from fault
            raise ApiTimeout(f"no answer from {self.url} in time") from fault
        except httpx.TransportError as fault:
            raise ApiUnavailable(f"{self.url}: {fault or type(fault).__name__}") from fault
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as fault:
            raise ApiAddressInvalid(f"{self.url}: {fault}") from fault

    def _in_time(self, until: float) -> None:
        if time.monotonic() > until:
            raise ApiTimeout(f"the answer from {self.url} has not come to its end within {self._timeout_s:g} s")


def trust(url: str, ca_file: str) -> ssl.SSLContext | bool:
    """The certificates to trust. Raises ApiAddressInvalid."""
    if not url.startswith("https:"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # none: reading them takes longer than a request
    if not ca_file:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as fault:
        raise ApiAddressInvalid(f"cannot use the certificates of {ca_file}: {fault}", code="api.ca_file") from None


class Client(_Connection):
    """Calls `/api/v1` and waits. Close it, or use it as a context manager; one thread at a time."""

    def __init__(self, url: str, token: str = "", **options: Any) -> None:
        """options: as of `_Connection`. Raises ApiAddressInvalid."""
        super().__init__(url, token, **options)
        self._http = httpx.Client(**self._options)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its connections."""
        self._http.close()

    def send(self, call: ApiCall[A]) -> A:
        """Carry out one call. Raises ApiProblem (a refusal), ApiUnavailable, ApiTimeout, ApiAnswerInvalid."""
        until = time.monotonic() + self._timeout_s
        with self._named():
            response = self._http.send(self._request(self._http, call), stream=True)
            try:
                answer = ApiAnswer(response.status_code, response.headers, call.answer)
                for piece in response.iter_raw():
                    answer.take(piece)
                    self._in_time(until)
            finally:
                response.close()
        result: A = answer.result()
        return result

    def follow(self, feed: Feed[A]) -> Iterator[A]:
        """Follow a stream to its end, over as many connections as it takes. Raises what `send` raises."""
        state = Following(feed)
        while not state.ended:
            fault: Fault | None = None
            try:
                with self._named():
                    yield from self._connection(feed, state)
            except (ApiProblem, ApiUnavailable, ApiTimeout) as raised:
                fault = raised
            if not state.ended:
                time.sleep(state.delay_s(fault))

    def _connection(self, feed: Feed[A], state: Following) -> Iterator[A]:
        response = self._http.send(self._request(self._http, feed), stream=True)
        try:
            answer = ApiAnswer(response.status_code, response.headers, None, EVENT_STREAM)
            if answer.is_good:
                yield from state.connected()
            for piece in response.iter_raw():
                if answer.is_good:
                    yield from state.take(piece)
                    if state.ended:
                        return
                else:
                    answer.take(piece)
        finally:
            response.close()
        if not answer.is_good:
            raise answer.problem()


class AsyncClient(_Connection):
    """Calls `/api/v1` and awaits. Close it, or use it as a context manager; many tasks at a time."""

    def __init__(self, url: str, token: str = "", **options: Any) -> None:
        """options: as of `_Connection`. Raises ApiAddressInvalid."""
        super().__init__(url, token, **options)
        self._http = httpx.AsyncClient(**self._options)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def send(self, call: ApiCall[A]) -> A:
        """Carry out one call. Raises ApiProblem (a refusal), ApiUnavailable, ApiTimeout, ApiAnswerInvalid."""
        until = time.monotonic() + self._timeout_s
        with self._named():
            response = await self._http.send(self._request(self._http, call), stream=True)
            try:
                answer = ApiAnswer(response.status_code, response.headers, call.answer)
                async for piece in response.aiter_raw():
                    answer.take(piece)
                    self._in_time(until)
            finally:
                await response.aclose()
        result: A = answer.result()
        return result

    async def follow(self, feed: Feed[A]) -> AsyncIterator[A]:
        """Follow a stream to its end, over as many connections as it takes. Raises what `send` raises."""
        state = Following(feed)
        while not state.ended:
            fault: Fault | None = None
            try:
                with self._named():
                    async for item in self._connection(feed, state):
                        yield item
            except (ApiProblem, ApiUnavailable, ApiTimeout) as raised:
                fault = raised
            if not state.ended:
                await asyncio.sleep(state.delay_s(fault))

    async def _connection(self, feed: Feed[A], state: Following) -> AsyncIterator[A]:
        response = await self._http.send(self._request(self._http, feed), stream=True)
        try:
            answer = ApiAnswer(response.status_code, response.headers, None, EVENT_STREAM)
            if answer.is_good:
                for item in state.connected():
                    yield item
            async for piece in response.aiter_raw():
                if answer.is_good:
                    for item in state.take(piece):
                        yield item
                    if state.ended:
                        return
                else:
                    answer.take(piece)
        finally:
            await response.aclose()
        if not answer.is_good:
            raise answer.problem()
