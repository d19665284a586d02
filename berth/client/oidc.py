"""Log in with an OpenID Connect provider by the device flow (RFC 8628): a person confirms a code in any browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any

import httpx
import msgspec
from msgspec import Meta as Bound
from msgspec import Struct

from berth.client.faults import ApiAddressInvalid
from berth.client.http import CONNECT_TIMEOUT_S, checked_url, trust
from berth.client.login import OidcOffer
from bus.contracts.base import MAX_REASON, reason_of
from bus.faults import Fault, Transient

DISCOVERY_PATH = "/.well-known/openid-configuration"
DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
MAX_ANSWER_BYTES = 256 * 1024
TIMEOUT_S = 15.0
MIN_INTERVAL_S, DEFAULT_INTERVAL_S, SLOWER_S, MAX_INTERVAL_S = 1.0, 5.0, 5.0, 60.0
MAX_WAIT_S = 1_800.0

Address = Annotated[str, Bound(min_length=1, max_length=2_000)]


class LoginFault(Fault):
    """The provider is none, refuses, or answers what cannot be used."""

    code = "oidc.provider_invalid"


class ProviderUnavailable(Transient):
    """The provider does not answer."""

    code = "oidc.unavailable"


class Discovery(Struct, frozen=True):
    """What a provider states of itself (OpenID Connect Discovery)."""

    issuer: Address
    jwks_uri: Address
    device_authorization_endpoint: Annotated[str, Bound(max_length=2_000)] = ""
    token_endpoint: Annotated[str, Bound(max_length=2_000)] = ""


class DeviceCode(Struct, frozen=True):
    """The code that a person confirms at an address."""

    device_code: Annotated[str, Bound(min_length=1, max_length=16_384)]
    user_code: Annotated[str, Bound(min_length=1, max_length=100)]
    verification_uri: Address
    expires_in: Annotated[float, Bound(gt=0)]
    verification_uri_complete: Annotated[str, Bound(max_length=2_000)] = ""
    interval: Annotated[float, Bound(ge=0)] = DEFAULT_INTERVAL_S


class _Tokens(Struct, frozen=True):
    access_token: str = ""
    id_token: str = ""


class _Refusal(Struct, frozen=True):
    error: Annotated[str, Bound(max_length=200)]


def checked_provider(found: Discovery, issuer: str) -> None:
    """Raises LoginFault unless it is this issuer's, and all its addresses are https or on this computer."""
    if found.issuer != issuer:
        raise LoginFault(f"the provider at {issuer} says that it is another: {found.issuer[:200]!r}")
    for url in (found.issuer, found.jwks_uri, found.device_authorization_endpoint, found.token_endpoint):
        try:
            if url:
                checked_url(url, insecure=False)
        except ApiAddressInvalid as fault:
            raise LoginFault(f"an address of the OpenID provider cannot be used: {fault.reason}") from None


def token_by_device(
    offer: OidcOffer,
    show: Callable[[DeviceCode], None],
    *,
    ca_file: str = "",
    sleep: Callable[[float], None] = time.sleep,
    monotonic: Callable[[], float] = time.monotonic,
) -> str:
    """A token for berth, when a person has confirmed the code that `show` is given.

    Raises LoginFault (refused, not confirmed in time, not to be used), ProviderUnavailable, ApiAddressInvalid.
    """
    provider = _Provider(offer.issuer, ca_file)
    with provider.http:
        found = provider.request("GET", offer.issuer.rstrip("/") + DISCOVERY_PATH, Discovery)
        assert isinstance(found, Discovery)
        checked_provider(found, offer.issuer)
        if not found.device_authorization_endpoint or not found.token_endpoint:
            raise LoginFault("the OpenID provider has no device flow (RFC 8628)")
        asked = {"client_id": offer.client_id, "scope": offer.scopes}
        device = provider.request("POST", found.device_authorization_endpoint, DeviceCode, asked)
        if isinstance(device, _Refusal):
            raise LoginFault(f"the OpenID provider refuses this client: {device.error!r}")
        show(device)
        form = {"grant_type": DEVICE_GRANT, "device_code": device.device_code, "client_id": offer.client_id}
        tokens = _polled(provider, found.token_endpoint, form, device, sleep=sleep, monotonic=monotonic)
    token: str = tokens.access_token if offer.by_access_token else tokens.id_token
    if not token:
        raise LoginFault("the OpenID provider's answer has not the token that berth takes")
    return token


def _polled(
    provider: _Provider,
    url: str,
    form: dict[str, str],
    device: DeviceCode,
    *,
    sleep: Callable[[float], None],
    monotonic: Callable[[], float],
) -> _Tokens:
    interval = min(max(device.interval, MIN_INTERVAL_S), MAX_INTERVAL_S)
    until = monotonic() + min(device.expires_in, MAX_WAIT_S)
    while monotonic() < until:
        sleep(interval)
        try:
            answer = provider.request("POST", url, _Tokens, form)
        except ProviderUnavailable:
            interval = min(interval * 2, MAX_INTERVAL_S)  # RFC 8628, 3.5: slower after a time-out
            continue
        match answer:
            case _Tokens():
                return answer
            case _Refusal(error="authorization_pending"):
                continue
            case _Refusal(error="slow_down"):
                interval = min(interval + SLOWER_S, MAX_INTERVAL_S)
            case _Refusal(error="expired_token"):
                break
            case _Refusal(error=error):
                raise LoginFault(f"the OpenID provider refuses: {error!r}", code="oidc.refused")
    raise LoginFault("the code was not confirmed in time", code="oidc.not_confirmed")


class _Provider:
    """The provider's answers, with their bounds. No proxy or login of the environment counts, as in the client."""

    def __init__(self, issuer: str, ca_file: str) -> None:
        checked_url(issuer, insecure=False)
        timeout = httpx.Timeout(TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self.http = httpx.Client(verify=trust(issuer, ca_file), trust_env=False, timeout=timeout)

    def request(self, method: str, url: str, kind: type[Any], form: dict[str, str] | None = None) -> Any:
        """The answer as this type, or a refusal (RFC 6749, 5.2) to a form."""
        body = bytearray()
        until = time.monotonic() + TIMEOUT_S
        try:
            with self.http.stream(method, url, data=form, headers={"accept": "application/json"}) as answer:
                for piece in answer.iter_bytes():
                    body += piece
                    if len(body) > MAX_ANSWER_BYTES:
                        raise LoginFault(f"{url} answers with more than {MAX_ANSWER_BYTES} bytes")
                    if time.monotonic() > until:
                        raise ProviderUnavailable(f"{url} does not answer in time")
        except (httpx.HTTPError, httpx.InvalidURL) as fault:
            raise ProviderUnavailable(f"{url}: {fault or type(fault).__name__}") from None
        if answer.status_code >= 500:
            raise ProviderUnavailable(f"{url} answers {answer.status_code}")
        refuses = form is not None and answer.status_code >= 400
        if answer.status_code != 200 and not refuses:
            raise LoginFault(f"{url} answers {answer.status_code}")
        try:
            return msgspec.json.decode(bytes(body), type=_Refusal if refuses else kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise LoginFault(f"{url} answers what is none: {reason_of(error)[:MAX_REASON]}") from None
