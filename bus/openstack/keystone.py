"""Signing in to Keystone: a token for every request, requested once, and again when it is refused or expires.

By httpx alone: the one request that this takes needs no library of its own, and nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Any

import httpx
import msgspec

from bus.clock import Clock
from bus.faults import Fault, Transient
from bus.openstack import answers
from bus.openstack.login import KeystoneLogin
from bus.service.settings import SettingsError, hide_password

TOKEN = "X-Auth-Token"
JSON = {"Content-Type": "application/json"}
SUBJECT = "X-Subject-Token"
# A token is not used in its last moments: the request it goes with has a way before it.
RENEW_EARLY_S = 60.0
MAX_TOKEN_BYTES = 8192


class SignInUnavailable(Transient):
    """Keystone cannot be reached, or does not answer a sign-in with a token: try again later."""

    code = "keystone.unavailable"


class SignInRefused(Fault):
    """Keystone turns our credentials down. For an operator."""

    code = "keystone.refused"


def unanswered(error: Exception, timeout_s: float) -> str:
    """Why a request to a service has no answer. timeout_s: what it was given (seconds)."""
    if isinstance(error, TimeoutError | httpx.TimeoutException):  # these say nothing themselves
        return f"no answer within {timeout_s:g} s"
    return f"{type(error).__name__}: {error}"


def checked_address(url: str, *, setting: str) -> str:
    """The address of a service, without slashes at its end. setting: its name. Raises SettingsError: no request could
    be made to it.
    """
    try:
        parsed = httpx.URL(url)
        is_sound = parsed.scheme in {"http", "https"} and bool(parsed.host) and 0 < (parsed.port or 1) < 2**16
    except (httpx.InvalidURL, ValueError):
        is_sound = False
    if not is_sound:  # it is not repeated: it may hold a password
        raise SettingsError(setting, f"{setting} is no address of a server: http://HOST:PORT/PATH, or https://")
    return url.rstrip("/")


class KeystoneAuth(httpx.Auth):
    """Gives each request of a client our token."""

    def __init__(
        self,
        login: KeystoneLogin,
        *,
        clock: Clock,
        timeout_s: float,
        verify: ssl.SSLContext | bool = True,
        setting: str = "keystone",
    ) -> None:
        """setting: the name of the login in the settings, for the error's code. Raises SettingsError."""
        # Keystone's resource of tokens
        self.url = (
            checked_address(login.auth_url, setting=f"{setting}.auth_url").removesuffix("/v3") + "/v3/auth/tokens"
        )
        try:
            self._body = msgspec.json.encode(_identity(login, setting))
        except UnicodeEncodeError:
            raise SettingsError(setting, f"{setting} has a name or a secret that is not UTF-8") from None
        self._clock = clock
        self._timeout_s = timeout_s
        self._client = httpx.AsyncClient(timeout=timeout_s, verify=verify, trust_env=False, headers=JSON)
        self._token = ""
        self._renew_at = 0.0
        self._signing_in = asyncio.Lock()

    async def async_auth_flow(self, request: httpx.Request) -> AsyncGenerator[httpx.Request, httpx.Response]:
        """The request with our token; once more with a new one when that is turned down."""
        token = self._token
        if not token or self._clock.time() >= self._renew_at:
            token = await self._sign_in(token)
        request.headers[TOKEN] = token
        answer = yield request
        if answer.status_code == httpx.codes.UNAUTHORIZED:  # revoked, or signed with keys that were rotated away
            request.headers[TOKEN] = await self._sign_in(token)
            yield request

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _sign_in(self, stale: str) -> str:
        """A token, unless another request has just fetched a newer one than `stale`.

        Raises SignInUnavailable, SignInRefused.
        """
        async with self._signing_in:
            if self._token != stale:
                return self._token
            try:
                answer = await answers.request(self._client, "POST", self.url, content=self._body)
            except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
                # The caller would take it for Ironic's.
                text = f"Keystone at {hide_password(self.url)}: {unanswered(error, self._timeout_s)}"
                raise SignInUnavailable(text) from error
            self._token, self._renew_at = self._parse_token(answer)
            return self._token

    def _parse_token(self, answer: httpx.Response) -> tuple[str, float]:
        """(the token, when to ask for the next). Raises SignInRefused, SignInUnavailable."""
        status = answer.status_code
        if status in {400, 401, 403, 404}:
            raise SignInRefused(f"Keystone answered {status} to our credentials", code=f"keystone.http_{status}")
        token = answer.headers.get(SUBJECT, "")
        if status != 201 or not token or len(token) > MAX_TOKEN_BYTES:
            raise SignInUnavailable(f"Keystone answered {status} to our sign-in")
        try:
            expires = datetime.fromisoformat(msgspec.json.decode(answer.content)["token"]["expires_at"])
            return token, expires.timestamp() - RENEW_EARLY_S
        except (msgspec.DecodeError, ValueError, OverflowError, LookupError, TypeError, RecursionError):
            return token, math.inf  # until it is turned down


def _identity(login: KeystoneLogin, setting: str) -> dict[str, Any]:
    """The body that Keystone wants (Identity API v3). Raises SettingsError."""
    user = {"name": login.username, "domain": _domain(login.user_domain_id, login.user_domain_name)}
    if login.application_credential_id or login.application_credential_name:
        named: dict[str, Any] = {"id": login.application_credential_id}
        if not login.application_credential_id:
            if not login.username:
                raise SettingsError(setting, "an application credential's name needs its username, too")
            named = {"name": login.application_credential_name, "user": user}
        secret = {**named, "secret": login.application_credential_secret}
        return {"auth": {"identity": {"methods": ["application_credential"], "application_credential": secret}}}
    if not login.username:
        raise SettingsError(setting, "a username or an application credential is needed")
    domain = _domain(login.project_domain_id, login.project_domain_name)
    scope = {"project": {"name": login.project_name, "domain": domain}}
    password = {"user": {**user, "password": login.password}}
    return {"auth": {"identity": {"methods": ["password"], "password": password}, "scope": scope}}


def _domain(by_id: str, by_name: str) -> dict[str, str]:
    return {"id": by_id} if by_id else {"name": by_name}
