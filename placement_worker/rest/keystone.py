"""Validates tokens with Keystone. The result is cached until the token expires or the cache time ends."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import OrderedDict
from datetime import datetime

import httpx
import msgspec
from msgspec import Struct

from bus.clock import Clock
from bus.contracts.base import reason_of
from bus.openstack.answers import request
from bus.openstack.keystone import MAX_TOKEN_BYTES, SUBJECT, KeystoneAuth, SignInUnavailable, unanswered
from bus.openstack.rest import tls_of
from placement_worker.rest.auth import Auth, Caller, Headers
from placement_worker.rest.config import KeystoneConfig

MAX_CACHED = 10_000
BAD_FOR_S = 10.0  # how long the result for an unknown token is cached
SETTING = "rest.keystone"

# The characters that a header may contain. A value with others is no Keystone token.
_TOKEN = re.compile(rb"[!-~]{1,%d}" % MAX_TOKEN_BYTES)


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


class Keystone(Auth):
    """Identifies callers by their Keystone tokens, without blocking the event loop. A token is validated once at a
    time.
    """

    def __init__(self, config: KeystoneConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        verify = tls_of(verify=not config.insecure, ca_file=config.cafile, setting=SETTING)
        self._auth = KeystoneAuth(config, clock=clock, timeout_s=config.timeout_s, verify=verify, setting=SETTING)
        self._client = httpx.AsyncClient(auth=self._auth, timeout=config.timeout_s, verify=verify, trust_env=False)
        self._cached: OrderedDict[bytes, CachedToken] = OrderedDict()
        self._validating: dict[bytes, asyncio.Task[CachedToken]] = {}

    async def identify(self, token: bytes, headers: Headers) -> Caller | None:
        """Return the owner of the token. Raises SignInUnavailable; SignInRefused: Keystone refuses the service user, so
        that the caller can only retry, although an operator must correct the settings.
        """
        if _TOKEN.fullmatch(token) is None:
            return None
        digest = hashlib.sha256(token).digest()  # the cache must not contain valid tokens
        known = self._cached.get(digest)
        if known is None or known.until <= self._clock.time():
            known = await self._look_up_once(digest, token)
        return known.caller

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()
        await self._auth.aclose()

    async def _look_up_once(self, digest: bytes, token: bytes) -> CachedToken:
        task = self._validating.get(digest)
        if task is None:
            task = self._validating[digest] = asyncio.create_task(self._look_up(digest, token), name="keystone")
            task.add_done_callback(lambda _: self._validating.pop(digest, None))
        return await asyncio.shield(task)

    async def _look_up(self, digest: bytes, token: bytes) -> CachedToken:
        known = self._understood(await self._validate(token))
        self._cached[digest] = known
        self._cached.move_to_end(digest)
        while len(self._cached) > MAX_CACHED:
            self._cached.popitem(last=False)
        return known

    def _understood(self, answer: httpx.Response) -> CachedToken:
        now = self._clock.time()
        if answer.status_code == 404:
            return CachedToken(None, now + BAD_FOR_S)
        if answer.status_code != 200:
            raise SignInUnavailable(f"Keystone answered {answer.status_code}")
        try:
            token = msgspec.json.decode(answer.content, type=_Answer).token
            expires = datetime.fromisoformat(token.expires_at).timestamp()
        except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
            raise SignInUnavailable(f"Keystone's answer cannot be read: {reason_of(error)}") from error
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

    async def _validate(self, token: bytes) -> httpx.Response:
        try:
            headers = {SUBJECT: token.decode("latin-1")}
            return await request(self._client, "GET", f"{self._auth.url}?nocatalog", headers=headers)
        except (httpx.HTTPError, TimeoutError) as error:
            raise SignInUnavailable(f"{self._auth.url}: {unanswered(error, self._config.timeout_s)}") from error
