"""Tokens that operators make and revoke while everything runs: objects of the schedulers, which hold digests alone."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Struct
from starlette.requests import Request

from berth.client.login import LoginOffer, OidcOffer
from berth.client.types import CallerView, TokenBody, TokenCreated, TokenRevoked, TokenView
from berth.web.api import Handlers, caller_of, converted, json_response, object_of, parsed, route
from berth.web.pages.objects import ObjectApi
from berth.web.problems import Problem
from berth.web.sign_in_sessions import Access, WebCaller, WebRole, digest_of
from bus.bus import Bus
from bus.clock import Clock
from bus.contracts.base import Word
from bus.contracts.objects import AccessToken, ObjectChange, ObjectKind, ObjectsChange, StoredObject, TokenRole
from bus.faults import Fault
from bus.transport import BusError

# Programs that look for secrets in sources know it by this; others are not looked up here.
TOKEN_PREFIX = "berth_"
# How old the known tokens may be: a revoked one is refused everywhere at the latest then, while schedulers answer.
MAX_AGE_S = 5.0
# ... of which the shown one is none: it may be new.
MIN_AGE_S = 1.0
# While no scheduler answers, tokens that were known go on so long: an operator's pages outlast a scheduler's restart.
KEPT_S = 300.0
# A caller waits so long for a scheduler; when none has answered, the next one is asked so much later.
READ_TIMEOUT_S = 3.0
FAILED_AGE_S = 5.0


class _Known(Struct, frozen=True):
    """The callers by the digests of their tokens, and when each ends."""

    callers: dict[str, tuple[WebCaller, float]] = {}
    read_at: float = float("-inf")


class StoredTokens:
    """The tokens on record, as this server knows them. However many callers show one, one request at a time asks."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._objects = ObjectApi(bus)
        self._clock = clock
        self._known = _Known()
        self._failed_at = float("-inf")
        self._reading = asyncio.Lock()

    def reread(self) -> None:
        """Have the next caller wait for what is on record now."""
        self._known = _Known(self._known.callers)
        self._failed_at = float("-inf")

    async def caller(self, token: str) -> WebCaller | None:
        """The owner of a token; None: there is none, or it has expired. Raises Problem 503: no scheduler answers, and
        the token is not known here, or was not confirmed for KEPT_S.
        """
        if not token.startswith(TOKEN_PREFIX):
            return None
        digest = digest_of(token)
        async with self._reading:
            if self._age() > (MAX_AGE_S if digest in self._known.callers else MIN_AGE_S):
                await self._read(may_keep=digest in self._known.callers)
        found, expires_at = self._known.callers.get(digest, (None, 0.0))
        return found if expires_at > self._clock.time() else None

    def _age(self) -> float:
        return self._clock.monotonic() - self._known.read_at

    async def _read(self, *, may_keep: bool) -> None:
        if self._clock.monotonic() - self._failed_at > FAILED_AGE_S:
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    _, stored = await self._objects.stored(ObjectKind.TOKEN)
            except (Fault, BusError, TimeoutError):
                self._failed_at = self._clock.monotonic()
            else:
                self._known = _Known(_callers(stored), self._clock.monotonic())
                return
        if not may_keep or self._age() > KEPT_S:
            raise Problem(503, "tokens.unavailable", "no scheduler tells which tokens are on record")


def _callers(stored: list[StoredObject]) -> dict[str, tuple[WebCaller, float]]:
    return {
        token.sha256: (WebCaller(one.name, WebRole[token.role.name], token.project), token.expires_at)
        for one, token in _tokens(stored)
    }


def _tokens(stored: Iterable[StoredObject]) -> Iterator[tuple[StoredObject, AccessToken]]:
    """The tokens among objects; without those of a newer scheduler, whose holders are refused here."""
    for one in stored:
        with contextlib.suppress(msgspec.ValidationError):
            yield one, msgspec.convert(one.body, AccessToken)


class WebTokens(Handlers):
    """The handlers. stored: to be read anew after a change; None: tokens on record are not accepted here."""

    def __init__(self, objects: ObjectApi, clock: Clock, stored: StoredTokens | None, access: Access) -> None:
        self._access = access
        self._objects = objects
        self._clock = clock
        self._stored = stored

    @route("GET", "/login")
    async def show_login(self, request: Request) -> object:
        """How one logs in; for everyone, without a token."""
        del request
        if self._access.oidc is None:
            return LoginOffer()
        config = self._access.oidc.config
        return LoginOffer(
            oidc=OidcOffer(
                issuer=config.issuer,
                client_id=config.client_id,
                scopes=config.scopes,
                by_access_token=bool(config.audience),
            )
        )

    @route("GET", "/caller")
    async def show_caller(self, request: Request) -> object:
        """Whom the shown token is of."""
        caller = caller_of(request)
        return CallerView(name=caller.name, role=TokenRole[caller.role.name], project=caller.project)

    @route("POST", "/tokens", role=WebRole.OPERATOR)
    async def create_token(self, request: Request) -> object:
        """Make a token; this answer alone has it. For operators."""
        body = converted(await object_of(request), TokenBody)
        secret = TOKEN_PREFIX + secrets.token_urlsafe(32)
        now = self._clock.time()
        fields = {
            "sha256": digest_of(secret),
            "role": body.role,
            "project": body.project,
            "expires_at": now + body.expires_in_s,
        }
        token = parsed(lambda: msgspec.convert(fields, AccessToken))
        caller = caller_of(request).name
        await self._change(
            caller,
            body.reason,
            ObjectChange(kind=ObjectKind.TOKEN, name=body.name, body=msgspec.to_builtins(token), if_version=0),
        )
        view = _view(body.name, token, now, caller)
        return json_response(TokenCreated(**msgspec.structs.asdict(view), token=secret), 201)

    @route("GET", "/tokens", role=WebRole.READER)
    async def list_tokens(self, request: Request) -> object:
        """The tokens on record by name, those that have expired as well. Not for role project."""
        del request
        _, stored = await self._objects.stored(ObjectKind.TOKEN)
        return [_view(one.name, token, one.changed_at, one.changed_by) for one, token in _tokens(stored)]

    @route("DELETE", "/tokens/{token}", role=WebRole.OPERATOR)
    async def revoke_token(self, request: Request) -> object:
        """Delete a token by its name: this server refuses it at once, others within 5 s. For operators."""
        name = parsed(lambda: msgspec.convert(request.path_params["token"], Word))
        await self._change(caller_of(request).name, "", ObjectChange(kind=ObjectKind.TOKEN, name=name))
        return TokenRevoked(name=name)

    async def _change(self, actor: str, reason: str, change: ObjectChange) -> None:
        try:
            await self._objects.change(ObjectsChange(changes=(change,), actor=actor, reason=reason))
        finally:
            if self._stored is not None:
                self._stored.reread()


def _view(name: str, token: AccessToken, created_at: float, created_by: str) -> TokenView:
    return TokenView(
        name=name,
        role=token.role,
        project=token.project,
        expires_at=token.expires_at,
        created_at=created_at,
        created_by=created_by,
    )
