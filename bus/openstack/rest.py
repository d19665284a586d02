"""The requirements of a client of an OpenStack service's REST API: its address, sign-in, TLS, and the words of its
refusals.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import httpx
import msgspec

from bus.clock import Clock
from bus.openstack.keystone import KeystoneAuth
from bus.openstack.login import KeystoneLogin
from bus.service.settings import SettingsError

MAX_VERSION = 16
IRONIC_VERSION = "X-OpenStack-Ironic-API-Version"
_LEAST, _MOST = "X-OpenStack-Ironic-API-Minimum-Version", "X-OpenStack-Ironic-API-Maximum-Version"
MAX_ERROR = 1_500  # characters of a service's error that go into a reason
_VERSION_PATH = re.compile(r"/v\d+(\.\d+)?$")


def api_root(url: str) -> str:
    """The address before the version: operators copy it with `/v1` or without."""
    return _VERSION_PATH.sub("", url.rstrip("/"))


def auth_of(
    keystone: KeystoneLogin,
    *,
    username: str,
    password: str,
    clock: Clock,
    timeout_s: float,
    verify: ssl.SSLContext | bool,
    setting: str,
) -> httpx.Auth | None:
    """Keystone where its address is given, else HTTP basic where a user is, else none. Raises SettingsError."""
    if keystone.auth_url:
        return KeystoneAuth(keystone, clock=clock, timeout_s=timeout_s, verify=verify, setting=setting)
    return httpx.BasicAuth(username, password) if username else None


def tls_of(*, verify: bool, ca_file: str, setting: str) -> ssl.SSLContext | bool:
    """How a server's certificate is checked. Raises SettingsError when the file cannot be used."""
    if not verify:
        return False
    if not ca_file:
        return _public_authorities()
    try:
        return ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise SettingsError(setting, f"{ca_file!r} is no file of certificates: {error}") from error


@cache
def _public_authorities() -> ssl.SSLContext:
    """One for all clients of a process: httpx would read the certificates anew for each, in 20 ms."""
    return httpx.create_ssl_context(trust_env=False)


def is_ironics(headers: Iterable[str], body: bytes) -> bool:
    """Whether an error is Ironic's own answer, so that its 404 is about the object and not, as a proxy's, about a path.

    headers: the names of the answer's.
    """
    if any(name.lower().startswith("x-openstack-ironic-api-") for name in headers):
        return True
    try:
        return "error_message" in msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def error_text(body: bytes) -> str:
    """The service's reason of its refusal, at most MAX_ERROR characters; empty when it gives none that is readable.

    Ironic: `{"error_message": {"faultstring": ...}}`, where the inner object may be a text that holds JSON.
    """
    try:
        message: Any = msgspec.json.decode(body)
        for _ in range(4):  # no service nests deeper
            if isinstance(message, str) and message.startswith("{"):
                message = msgspec.json.decode(message)
            if not isinstance(message, dict):
                break
            message = (
                message.get("error_message") or message.get("faultstring") or message.get("message") or _only(message)
            )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return " ".join(message.split())[:MAX_ERROR] if isinstance(message, str) else ""


def _only(message: dict[str, Any]) -> Any:
    """Neutron and Keystone put the error under a name of its own."""
    return next(iter(message.values())) if len(message) == 1 else None


def parse_version(text: str) -> tuple[int, int]:
    """A microversion as numbers; (0, 0): it is none."""
    major, _, minor = text.partition(".")
    if not (text.isascii() and major.isdigit() and minor.isdigit() and len(text) <= MAX_VERSION):
        return (0, 0)
    return int(major), int(minor)


def newest_version(headers: Mapping[str, str]) -> tuple[int, int]:
    """The newest microversion that an answer of Ironic says it has; (0, 0): it says none."""
    return parse_version(headers.get(_MOST) or "")


def version_advice(headers: Mapping[str, str], setting: str) -> str:
    """The reaction to Ironic's 406: it does not support the requested microversion."""
    least, most = headers.get(_LEAST), headers.get(_MOST)
    if not least or not most:
        return f"Ironic does not support the requested microversion: set {setting} to one that it does"
    return f"Ironic supports microversions {least} to {most}: set {setting} to one of them"
