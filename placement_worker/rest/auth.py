"""Identifies the caller of a request: the port, and two of its adapters. The third adapter is in `keystone.py`. An
unknown caller (None) is answered 401.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from bus.contracts.base import reason_of
from bus.service.settings import SettingsError, read_toml
from placement_worker.rest.config import RestConfig

Headers = Mapping[bytes, bytes]
TOKEN = b"x-auth-token"


class Caller(Struct, frozen=True, kw_only=True):
    """A caller, with the attributes that policies read. system_scope: "all" for a system-scoped token, which has no
    project.
    """

    user_id: str
    project_id: str | None = None
    domain_id: str | None = None
    roles: tuple[str, ...] = ()
    system_scope: str | None = None


class Auth(ABC):
    """Identifies callers by their headers."""

    @abstractmethod
    async def identify(self, token: bytes, headers: Headers) -> Caller | None:
        """Return the caller, or None when the token is invalid. headers: all of the request's. Raises Transient."""

    async def close(self) -> None:  # noqa: B027  (most have no resources)
        """Release the resources of this object."""


class NoAuth2(Auth):
    """Placement's test mode: the token is `user[:project]`, and all other attributes are taken from the caller's
    headers.
    """

    async def identify(self, token: bytes, headers: Headers) -> Caller | None:
        """Trust the caller."""
        user, _, project = token.decode("latin-1").partition(":")
        value = headers.get(b"x-roles")
        if value is not None:
            roles = tuple(role.strip() for role in value.decode("latin-1").split(",") if role.strip())
        else:
            roles = ("admin",) if user == "admin" else ()
        scope = headers.get(b"openstack-system-scope")
        project_id: str | None = None if scope else project or user
        if b"x-project-id" in headers:
            project_id = headers[b"x-project-id"].decode("latin-1")
        return Caller(
            user_id=user, project_id=project_id, roles=roles, system_scope=scope.decode("latin-1") if scope else None
        )


class TokenRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One token of the file: its owner, and the SHA-256 of the token in hex, so that the file contains no secret."""

    sha256: str
    user_id: str
    project_id: str | None = None
    roles: tuple[str, ...] = ()


class TokenFile(Auth):
    """A fixed list of tokens, for small sites."""

    def __init__(self, path: Path) -> None:
        try:
            rows = msgspec.convert(read_toml(path).get("tokens", []), list[TokenRow])
        except msgspec.ValidationError as error:
            raise SettingsError("rest.token_file", f"{path}: {reason_of(error)}") from error
        if not rows:
            raise SettingsError("rest.token_file", f"{path} has no [[tokens]]")
        self._callers = [
            (row.sha256.lower(), Caller(user_id=row.user_id, project_id=row.project_id, roles=row.roles))
            for row in rows
        ]

    async def identify(self, token: bytes, headers: Headers) -> Caller | None:
        """Look up the token in a time that does not depend on how many of its characters are right."""
        digest = hashlib.sha256(token).hexdigest()
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


def local_auth(config: RestConfig, host: str) -> Auth:
    """Return noauth2 or the token file, by the settings. Raises SettingsError when the settings do not allow it."""
    if config.auth == "tokens":
        if not config.token_file:
            raise SettingsError("rest.token_file", "auth = tokens needs token_file")
        return TokenFile(Path(config.token_file))
    if not noauth2_may_listen(config, host):
        raise SettingsError(
            "rest.noauth2",
            f"noauth2 accepts every caller and so listens on loopback only, not on {host}; "
            "set noauth2_anywhere = true if that is really meant",
        )
    return NoAuth2()


def noauth2_may_listen(config: RestConfig, host: str) -> bool:
    """Whether noauth2 may be used on this address: on loopback, or when a second setting confirms it."""
    return config.noauth2_anywhere or _is_loopback(host)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
