"""Tokens of an OpenID Connect provider: checked by its public keys, and what their claims allow here."""

from __future__ import annotations

import asyncio
import base64
from typing import Annotated, Any

import httpx
import msgspec
from joserfc import jwt
from joserfc.errors import ExpiredTokenError, JoseError
from joserfc.jwk import ECKey, KeySet, RSAKey
from msgspec import Meta as Bound
from msgspec import Struct

from berth.client.oidc import DISCOVERY_PATH, MAX_ANSWER_BYTES, Discovery, checked_provider
from berth.config.oidc import OidcConfig
from berth.web.problems import Problem
from berth.web.sign_in_sessions import WebCaller, WebRole
from bus.clock import Clock
from bus.contracts.base import Label, Word
from bus.faults import Fault, Transient
from bus.openstack.answers import request
from bus.openstack.keystone import unanswered
from bus.openstack.rest import tls_of
from bus.service.settings import SettingsError

MAX_TOKEN_BYTES = 8 * 1024
MAX_KEYS = 100
# How old the known keys may be: one that the provider withdraws is refused at the latest then.
MAX_AGE_S = 600.0
# ... where the token names a key that is not among them: it may be new. Guesses ask no more often.
MIN_AGE_S = 10.0
# While the provider does not answer, keys that were known go on so long.
KEPT_S = 3600.0
_RSA_BITS = range(2048, 8193)
_ALLOWED_KEYS: dict[str, type[RSAKey | ECKey]] = {"RSA": RSAKey, "EC": ECKey}


class OidcUnavailable(Transient):
    """The provider does not answer, or not as one does."""

    code = "oidc.unavailable"


class _Header(Struct, frozen=True):
    alg: str
    kid: Annotated[str, Bound(max_length=500)] = ""


class _KeyFields(Struct, frozen=True):
    keys: Annotated[tuple[dict[str, Any], ...], Bound(max_length=MAX_KEYS)]


class _Known(Struct, frozen=True):
    """The provider's keys by their ids, and when they were read."""

    keys: KeySet | None = None
    ids: frozenset[str] = frozenset()
    read_at: float = float("-inf")


class Oidc:
    """Knows the owners of the provider's tokens. However many callers show one, one request at a time asks for keys."""

    def __init__(self, config: OidcConfig, clock: Clock) -> None:
        """Raises SettingsError."""
        self.config = checked(config)
        self._clock = clock
        verify = tls_of(verify=True, ca_file=config.ca_file, setting="web.oidc")
        self._client = httpx.AsyncClient(timeout=config.timeout_s, verify=verify, trust_env=False)
        self._known = _Known()
        self._failed_at = float("-inf")
        self._reading = asyncio.Lock()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def caller(self, token: str) -> WebCaller | None:
        """The owner of a token; None: it is none of this provider's. Raises Problem 401 (expired, not for berth, or not
        signed by the provider), 403 (its claims allow nothing), 503 (the provider is away, and its keys not known).
        """
        header = self._header_of(token)
        if header is None:
            return None
        if header.alg not in self.config.algorithms:
            raise _invalid("it has a signature that is not taken: web.oidc.algorithms")
        keys = await self._keys_with(header.kid)
        return caller_by_claims(self._checked_claims(token, keys), self.config)

    def _header_of(self, token: str) -> _Header | None:
        """The header of a token that says that it is of this provider; None of all others, as of Keystone's."""
        if len(token) > MAX_TOKEN_BYTES or token.count(".") != 2:
            return None
        header, claims, _ = token.split(".")
        try:
            if msgspec.json.decode(_bytes_of(claims), type=dict[str, Any]).get("iss") != self.config.issuer:
                return None
            return msgspec.json.decode(_bytes_of(header), type=_Header)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None

    def _checked_claims(self, token: str, keys: KeySet) -> dict[str, Any]:
        audience = self.config.audience or self.config.client_id
        rules = jwt.JWTClaimsRegistry(
            now=int(self._clock.time()),
            leeway=self.config.clock_skew_s,
            iss={"essential": True, "value": self.config.issuer},
            aud={"essential": True, "value": audience},
            exp={"essential": True},
            sub={"essential": True},
        )
        try:
            claims = jwt.decode(token, keys, list(self.config.algorithms)).claims
            rules.validate(claims)
        except ExpiredTokenError:
            raise _invalid("it has expired: `berth login` again", code="oidc.token_expired") from None
        except (JoseError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise _invalid(str(error) if isinstance(error, JoseError) else "it cannot be read") from None
        if not self.config.audience and claims.get("azp", audience) != audience:
            raise _invalid("it was issued to another client (azp)")
        return claims

    async def _keys_with(self, kid: str) -> KeySet:
        """The provider's keys, with this one if it has it. Raises Problem 503."""
        async with self._reading:
            now = self._clock.monotonic()
            is_known = self._known.keys is not None and (not kid or kid in self._known.ids)
            if now - self._known.read_at > (MAX_AGE_S if is_known else MIN_AGE_S):
                await self._read_keys(now)
            if self._known.keys is None or now - self._known.read_at > KEPT_S:
                detail = "the OpenID provider does not answer"
                raise Problem(503, OidcUnavailable.code, detail, headers={"retry-after": "1"})
            return self._known.keys

    async def _read_keys(self, now: float) -> None:
        if now - self._failed_at <= MIN_AGE_S:
            return
        try:
            config = self.config
            found = await self._get(config.issuer.rstrip("/") + DISCOVERY_PATH, Discovery)
            checked_provider(found, config.issuer)
            keys = [_key_of(one) for one in (await self._get(found.jwks_uri, _KeyFields)).keys]
        except Fault:
            self._failed_at = now
            return
        usable = [key for key in keys if key is not None]
        self._known = _Known(KeySet([*usable]), frozenset(key.kid or "" for key in usable), now)

    async def _get(self, url: str, kind: type[Any]) -> Any:
        try:
            answer = await request(
                self._client, "GET", url, max_bytes=MAX_ANSWER_BYTES, timeout_s=self.config.timeout_s
            )
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise OidcUnavailable(unanswered(error, self.config.timeout_s)) from None
        try:
            if answer.status_code != 200:
                raise OidcUnavailable(f"status {answer.status_code}")
            return msgspec.json.decode(answer.content, type=kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise OidcUnavailable(f"{type(error).__name__}") from None


def checked(config: OidcConfig) -> OidcConfig:
    """The settings, if they can be used. Raises SettingsError."""
    try:
        checked_provider(Discovery(issuer=config.issuer, jwks_uri=config.issuer), config.issuer)
    except Fault as fault:
        raise SettingsError("web.oidc", f"web.oidc.issuer: {fault.reason}") from None
    if not config.client_id:
        raise SettingsError("web.oidc", "web.oidc.issuer needs web.oidc.client_id")
    if not config.operators and not config.readers and not config.project_claim:
        raise SettingsError("web.oidc", "web.oidc allows nobody anything: set operators, readers or project_claim")
    return config


def caller_by_claims(claims: dict[str, Any], config: OidcConfig) -> WebCaller:
    """What the claims allow, the most of it. Raises Problem 403: nothing, or the name or the project is none."""
    name = _converted(_at(claims, config.name_claim), Label, config.name_claim)
    if not name.isprintable():
        raise Problem(403, "oidc.claim_invalid", f"the claim {config.name_claim} has letters that cannot be printed")
    roles = _texts(_at(claims, config.role_claim))
    if roles & set(config.operators):
        return WebCaller(name, WebRole.OPERATOR)
    if roles & set(config.readers):
        return WebCaller(name, WebRole.READER)
    projects = _texts(_at(claims, config.project_claim)) if config.project_claim else frozenset()
    if len(projects) == 1 and (not config.members or roles & set(config.members)):
        return WebCaller(name, WebRole.PROJECT, _converted(next(iter(projects)), Word, config.project_claim))
    raise Problem(403, "role.insufficient", "the claims of this token give no role here: web.oidc")


def _at(claims: dict[str, Any], path: str) -> object:
    """The claim of this name, else the one within others that the dots lead to: names such as https://x.y have dots."""
    found: object = claims.get(path)
    if found is None:
        found = claims
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else None
    return found


def _texts(value: object) -> frozenset[str]:
    values = value if isinstance(value, list) else [value]
    return frozenset(one for one in values if isinstance(one, str))


def _converted(value: object, kind: Any, claim: str) -> str:
    try:
        found: str = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise Problem(403, "oidc.claim_invalid", f"the claim {claim} is missing, or cannot be used") from None
    return found


def _invalid(reason: str, *, code: str = "oidc.token_invalid") -> Problem:
    headers = {"www-authenticate": 'Bearer error="invalid_token"'}
    return Problem(401, code, f"the token of the OpenID provider is refused: {reason}", headers=headers)


def _key_of(fields: dict[str, Any]) -> RSAKey | ECKey | None:
    """A key for signatures; None: it is for something else, or not understood, and the others count."""
    kind = _ALLOWED_KEYS.get(str(fields.get("kty")))
    public = {name: value for name, value in fields.items() if name in ("kty", "kid", "alg", "n", "e", "crv", "x", "y")}
    if kind is None or fields.get("use", "sig") != "sig":
        return None
    try:
        key = kind.import_key(public)
        return key if not isinstance(key, RSAKey) or key.raw_value.key_size in _RSA_BITS else None
    except (JoseError, ValueError, TypeError, LookupError):
        return None


def _bytes_of(part: str) -> bytes:
    return base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
