"""Validates tokens with Keystone. The result is cached until the token expires or the cache time ends."""

from __future__ import annotations

import asyncio
import hashlib
import re
import ssl
from collections import OrderedDict
from datetime import datetime
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from bus.clock import Clock
from bus.contracts.patterns import reason_of
from bus.faults import Fault, Transient
from bus.service.settings import SettingsError
from placement_worker.rest.auth import TOKEN, Caller, Headers
from placement_worker.rest.config import KeystoneConfig

MAX_KNOWN = 10_000
MAX_TOKEN_BYTES = 8192
BAD_FOR_S = 10.0  # how long the result for an unknown token is cached
SUBJECT = "X-Subject-Token"

# The characters that a header may contain. A value with others is no Keystone token.
_TOKEN = re.compile(rb"[!-~]{1,%d}" % MAX_TOKEN_BYTES)


class KeystoneUnavailable(Transient):
    """Keystone is out of reach, or cannot answer."""

    code = "rest.keystone_unavailable"


class KeystoneForbidden(Fault):
    """Keystone refuses the credentials of the service user. The caller can only retry, although an operator must
    correct the settings.
    """

    code = "rest.keystone_forbidden"


class _Named(Struct, frozen=True):
    id: str = ""
    name: str = ""


class _Token(Struct, frozen=True):
    user: _Named
    expires_at: str
    roles: tuple[_Named, ...] = ()
    project: _Named | None = None
    domain: _Named | None = None
    system: dict[str, bool] | None = None


class _Answer(Struct, frozen=True):
    token: _Token


class CachedToken(Struct, frozen=True):
    """The owner of a token (None: unknown token), and the wall-clock time until which this result is valid."""

    caller: Caller | None
    until: float


class Keystone:
    """Identifies callers by their Keystone tokens, without blocking the event loop. A token is validated once at a
    time.
    """

    def __init__(self, config: KeystoneConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._client = httpx.AsyncClient(timeout=config.timeout_s, verify=_verify(config))
        self._url = config.auth_url.rstrip("/").removesuffix("/v3") + "/v3/auth/tokens"
        self._own = ""
        self._signing_in = asyncio.Lock()
        self._known: OrderedDict[bytes, CachedToken] = OrderedDict()
        self._validating: dict[bytes, asyncio.Task[CachedToken]] = {}

    async def identify(self, headers: Headers) -> Caller | None:
        """Return the owner of the token. Raises KeystoneUnavailable, KeystoneForbidden."""
        token = headers.get(TOKEN, b"")
        if _TOKEN.fullmatch(token) is None:
            return None
        digest = hashlib.sha256(token).digest()  # the cache must not contain valid tokens
        known = self._known.get(digest)
        if known is None or known.until <= self._clock.time():
            known = await self._look_up_once(digest, token)
        return known.caller

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _look_up_once(self, digest: bytes, token: bytes) -> CachedToken:
        task = self._validating.get(digest)
        if task is None:
            task = self._validating[digest] = asyncio.create_task(self._look_up(digest, token), name="keystone")
            task.add_done_callback(lambda _: self._validating.pop(digest, None))
        return await asyncio.shield(task)

    async def _look_up(self, digest: bytes, token: bytes) -> CachedToken:
        own = self._own or await self._sign_in("")
        answer = await self._validate(own, token)
        if answer.status_code == 401:  # the service user's token has expired or was revoked
            answer = await self._validate(await self._sign_in(own), token)
        known = self._understood(answer)
        self._known[digest] = known
        self._known.move_to_end(digest)
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known

    def _understood(self, answer: httpx.Response) -> CachedToken:
        now = self._clock.time()
        if answer.status_code == 404:
            return CachedToken(None, now + BAD_FOR_S)
        if answer.status_code != 200:
            raise KeystoneUnavailable(f"Keystone answered {answer.status_code}")
        try:
            token = msgspec.json.decode(answer.content, type=_Answer).token
            expires = datetime.fromisoformat(token.expires_at).timestamp()
        except (msgspec.DecodeError, ValueError) as error:
            raise KeystoneUnavailable(f"Keystone's answer cannot be read: {reason_of(error)}") from error
        if expires <= now:
            return CachedToken(None, now + BAD_FOR_S)
        caller = Caller(
            user_id=token.user.id,
            project_id=token.project.id if token.project is not None else None,
            domain_id=token.domain.id if token.domain is not None else None,
            system_scope="all" if token.system is not None and token.system.get("all") else None,
            roles=tuple(role.name for role in token.roles),
        )
        return CachedToken(caller, min(expires, now + self._config.cache_s))

    async def _validate(self, own: str, token: bytes) -> httpx.Response:
        headers = {"X-Auth-Token": own, SUBJECT: token.decode("latin-1")}
        return await self._send("GET", "?nocatalog", headers, None)

    async def _sign_in(self, stale: str) -> str:
        """Fetch a token for the service user, unless another request has just fetched one newer than `stale`."""
        async with self._signing_in:
            if self._own != stale:
                return self._own
            config = self._config
            user = {
                "name": config.username,
                "password": config.password,
                "domain": _domain(config.user_domain_id, config.user_domain_name),
            }
            domain = _domain(config.project_domain_id, config.project_domain_name)
            project = {"name": config.project_name, "domain": domain}
            body = {
                "auth": {
                    "identity": {"methods": ["password"], "password": {"user": user}},
                    "scope": {"project": project},
                }
            }
            answer = await self._send("POST", "", {}, body)
            if answer.status_code in {401, 403}:
                raise KeystoneForbidden(f"Keystone does not take the credentials of {config.username}")
            if answer.status_code != 201 or SUBJECT not in answer.headers:
                raise KeystoneUnavailable(f"Keystone answered {answer.status_code} to our own sign-in")
            self._own = answer.headers[SUBJECT]
            return self._own

    async def _send(self, method: str, query: str, headers: dict[str, str], body: Any) -> httpx.Response:
        try:
            return await self._client.request(method, self._url + query, headers=headers, json=body)
        except httpx.HTTPError as error:
            raise KeystoneUnavailable(f"{type(error).__name__}: {error}") from error


def _domain(by_id: str, by_name: str) -> dict[str, str]:
    return {"id": by_id} if by_id else {"name": by_name}


def _verify(config: KeystoneConfig) -> ssl.SSLContext | bool:
    """Return the TLS verification of Keystone's certificate by the settings. Raises SettingsError."""
    if config.insecure:
        return False
    if not config.cafile:
        return True
    try:
        return ssl.create_default_context(cafile=config.cafile)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError("rest.keystone", f"cannot use cafile {config.cafile}: {error}") from error
