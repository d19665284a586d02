"""The caller, and its permissions.

Without a token file, an OpenID provider and Keystone every caller of this computer is an operator, and the server
listens on loopback alone. With one of them a caller shows its token, or one that the schedulers have on record
(`Authorization: Bearer` or `X-Auth-Token`), or logs in with it on the page and has a session.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from berth.config.oidc import OidcConfig
from berth.web.problems import Problem
from bus.clock import Clock
from bus.contracts.base import Message, Word, reason_of
from bus.contracts.catalogue import FORBIDDEN, forbidden, operators_rights
from bus.faults import Fault
from bus.service.settings import SettingsError, read_toml
from placement_worker.rest.auth import Auth, Caller

SESSION_COOKIE = "berth_session"
SESSION_S = 12 * 3600.0
MAX_SESSIONS = 1_000
MAX_SESSIONS_OF_TOKEN = 20
MAX_TOKEN_BYTES = 512


class WebRole(IntEnum):
    """The permissions of a caller, in ascending order."""

    PROJECT = 1  # build, delete and see in its own project
    READER = 2  # see everything, change nothing
    OPERATOR = 3  # see and do everything


class WebCaller(Struct, frozen=True):
    """The caller. project: of a `project` caller, the only one it sees."""

    name: str
    role: WebRole
    project: str | None = None

    @property
    def sees(self) -> str | None:
        """The project whose builds it sees; None: all."""
        return self.project if self.role is WebRole.PROJECT else None


_SHA256 = re.compile("[0-9a-f]{64}")

LOCAL = WebCaller("local", WebRole.OPERATOR)


class _TokenRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token of the file, by the SHA-256 of the token in hex, so that the file holds no secret."""

    sha256: str
    name: str
    role: str
    project: Word | None = None


# The permissions that the roles of a Keystone token give here, as OpenStack's secure RBAC means them.
OPERATOR_ROLE = "admin"
SYSTEM_ROLES = frozenset({"reader", "member", "manager"})
PROJECT_ROLES = frozenset({"member", "manager"})


class ProviderTokens(Protocol):
    """The tokens of an OpenID Connect provider: `berth.web.oidc.Oidc`."""

    config: OidcConfig

    async def caller(self, token: str) -> WebCaller | None:
        """The owner of a token; None: it is none of this provider's. Raises Problem 401, 403 and 503."""
        ...


class Access:
    """Knows callers, by the SHA-256 of their tokens, by an OpenID Connect provider, or by Keystone.

    None of them: there are no tokens, and every caller is the operator. keystone, oidc: closed by whose they are.
    """

    def __init__(
        self,
        callers: Mapping[str, WebCaller] | None,
        clock: Clock,
        keystone: Auth | None = None,
        oidc: ProviderTokens | None = None,
    ) -> None:
        self._clock = clock
        self._callers = callers or {}
        self._keystone = keystone
        self.oidc = oidc
        self._sessions: dict[str, tuple[str, float]] = {}
        self.open = callers is None and keystone is None and oidc is None
        self.stored: Callable[[str], Awaitable[WebCaller | None]] | None = None  # of tokens on record; the server's

    async def caller(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> WebCaller:
        """The caller of one request. Raises Problem 401, 403 (a role that allows nothing), 503 (Keystone is away)."""
        if self.open:
            return LOCAL
        token = headers.get("x-auth-token") or _bearer(headers.get("authorization", ""))
        found = await self.by_token(token or self._of_session(cookies.get(SESSION_COOKIE, "")))
        if found is None:
            message = "show a token (`berth login`, `berth token create`): Authorization: Bearer TOKEN"
            raise Problem(401, "auth.required", message, headers={"www-authenticate": "Bearer"})
        return found

    async def by_token(self, token: str) -> WebCaller | None:
        """The owner of the token. Only digests are compared, so the time it takes reveals nothing about the token.

        Raises Problem 401 (of an OpenID provider's token), 403 and 503.
        """
        if not token:
            return None
        if len(token) <= MAX_TOKEN_BYTES and (found := self._callers.get(digest_of(token))) is not None:
            return found
        if self.stored is not None and (found := await self.stored(token)) is not None:
            return found
        if self.oidc is not None and (found := await self.oidc.caller(token)) is not None:
            return found
        if self._keystone is None:
            return None
        try:
            known = await self._keystone.identify(token.encode("utf-8", "replace"), {})
        except Fault as fault:
            raise Problem(503, fault.code, str(fault), headers={"retry-after": "1"}) from fault
        return None if known is None else caller_by_roles(known)

    def log_in(self, token: str) -> str:
        """A new session with a token: the cookie's value. It ends with the token, if not before; where there are too
        many, the oldest of this token ends, and of all tokens the oldest of the one that has most.
        """
        now = self._clock.monotonic()
        self._sessions = {key: one for key, one in self._sessions.items() if one[1] > now}
        for whose, most in ((token, MAX_SESSIONS_OF_TOKEN), (None, MAX_SESSIONS)):
            while self._count(whose) >= most:
                crowded = whose or Counter(one for one, _ in self._sessions.values()).most_common(1)[0][0]
                del self._sessions[next(key for key, one in self._sessions.items() if one[0] == crowded)]
        session = secrets.token_urlsafe(32)
        self._sessions[session] = (token, now + SESSION_S)
        return session

    def _count(self, token: str | None) -> int:
        return sum(token in (None, one) for one, _ in self._sessions.values())

    def log_out(self, session: str) -> None:
        """End a session."""
        self._sessions.pop(session, None)

    def _of_session(self, session: str) -> str:
        token, until = self._sessions.get(session, ("", 0.0))
        return token if until > self._clock.monotonic() else ""


def caller_by_roles(known: Caller) -> WebCaller:
    """The permissions of a Keystone token's owner. Raises Problem 403: none of its roles allows anything here."""
    roles = frozenset(known.roles)
    if OPERATOR_ROLE in roles:
        return WebCaller(known.user_id, WebRole.OPERATOR)
    if known.system_scope == "all" and roles & SYSTEM_ROLES:
        return WebCaller(known.user_id, WebRole.READER)
    if known.project_id and roles & PROJECT_ROLES:
        return WebCaller(known.user_id, WebRole.PROJECT, known.project_id)
    raise Problem(403, "role.insufficient", "this token needs role admin, a role on the system, or member of a project")


def check_rights(caller: WebCaller, message: Message) -> None:
    """Raises Problem 403 when a message requests what only an operator may, by the table that the bus goes by, too."""
    if caller.role < WebRole.OPERATOR and operators_rights(message):
        raise Problem(403, FORBIDDEN, forbidden(message))


def check_listen(host: str, access: Access) -> None:
    """Raises SettingsError when callers of other computers would be operators without a token."""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if access.open and not is_local:
        raise SettingsError(
            "web.tokens", f"without --tokens, --keystone or web.oidc it listens on loopback alone, not at {host}"
        )


def _bearer(header: str) -> str:
    scheme, _, token = header.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def digest_of(token: str) -> str:
    """The cached part of a token: its SHA-256 in hex."""
    return hashlib.sha256(token.encode()).hexdigest()


def read_tokens(path: Path) -> dict[str, WebCaller]:
    """The callers of a token file, by the digests of their tokens. Raises SettingsError."""
    try:
        rows = msgspec.convert(read_toml(path).get("tokens", []), list[_TokenRow])
    except msgspec.ValidationError as error:
        raise SettingsError("web.tokens", f"{path}: {reason_of(error)}") from error
    if not rows:
        raise SettingsError("web.tokens", f"{path} has no [[tokens]]")
    callers: dict[str, WebCaller] = {}
    for row in rows:
        digest = row.sha256.lower()
        if not _SHA256.fullmatch(digest):
            raise SettingsError("web.tokens", f"{path}: sha256 of {row.name!r} is not 64 hexadecimal digits")
        if digest in callers:
            raise SettingsError("web.tokens", f"{path}: {row.name!r} has the token of {callers[digest].name!r}")
        try:
            role = WebRole[row.role.upper()]
        except KeyError:
            known = ", ".join(one.name.lower() for one in WebRole)
            raise SettingsError("web.tokens", f"{path}: role {row.role!r} of {row.name!r} is none of {known}") from None
        if (role is WebRole.PROJECT) != (row.project is not None):
            raise SettingsError("web.tokens", f"{path}: {row.name!r}: role project has a project, no other has")
        callers[digest] = WebCaller(row.name, role, row.project)
    return callers
