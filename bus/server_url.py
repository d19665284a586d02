"""URLs of servers: `scheme://user:password@host:port,host:port/name?parameter=value`, one or several hosts.

Several hosts are written as in libpq: one login, one name, and the hosts separated by commas. No error message here
shows a part of a URL, because a misplaced part may be the password.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Collection, Mapping
from urllib.parse import unquote

from msgspec import Struct

MAX_URL = 8_192
MAX_HOSTS = 16
MAX_PORT = 65_535

# The host names that getaddrinfo accepts.
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_MAX_NAME = 253

_ENCODE = "in a user, password or name each of @ : / ? # % and , is percent-encoded (@ is %40)"


class BadUrl(ValueError):
    """A text is no URL of a server. The message has the reason, and no part of the text."""


class Endpoint(Struct, frozen=True):
    """One server: a name, an address, or the directory of a Unix socket."""

    name: str
    port: int | None = None  # None for the default port

    def __str__(self) -> str:
        name = f"[{self.name}]" if ":" in self.name else self.name
        return name if self.port is None else f"{name}:{self.port}"


class ServerUrl(Struct, frozen=True, kw_only=True):
    """The parts of a URL, percent-decoded."""

    scheme: str
    # user, password, name: None when not given
    user: str | None
    password: str | None
    hosts: tuple[Endpoint, ...]
    name: str | None
    parameters: dict[str, str]


def parse_server_url(text: str, *, schemes: Collection[str], parameters: Collection[str]) -> ServerUrl:
    """Parse a URL. parameters: the names that are allowed after `?`. Raises BadUrl."""
    if len(text) > MAX_URL:
        raise BadUrl(f"it is longer than {MAX_URL} characters")
    if any(not character.isprintable() or character.isspace() for character in text):
        raise BadUrl("it contains a blank or a control character")
    scheme, _, rest = text.partition("://")
    if scheme not in schemes:
        raise BadUrl(f"it starts with none of {', '.join(f'{one}://' for one in schemes)}")
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    if "#" in text or "@" in path or "@" in query:
        raise BadUrl(_ENCODE)
    login, at, hosts = authority.rpartition("@")
    user, colon, password = login.partition(":")
    return ServerUrl(
        scheme=scheme,
        user=_decoded(user) if at and user else None,
        password=_decoded(password) if colon else None,
        hosts=parse_hosts(hosts),
        name=_decoded(path) if slash and path else None,
        parameters=_parameters(query, parameters),
    )


def parse_hosts(text: str) -> tuple[Endpoint, ...]:
    """Parse `host:port,host:port`. An empty text has no hosts. Raises BadUrl."""
    if not text:
        return ()
    parts = text.split(",")
    if len(parts) > MAX_HOSTS:
        raise BadUrl(f"it names more than {MAX_HOSTS} hosts")
    return tuple(_host(part) for part in parts)


def parse_port(text: str) -> int:
    """Parse a TCP port. Raises BadUrl."""
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_PORT)) and 0 < int(text) <= MAX_PORT):
        raise BadUrl(f"a port is a number from 1 to {MAX_PORT}")
    return int(text)


def load_tls_files(
    context: ssl.SSLContext, given: Mapping[str, str], *, authorities: Collection[str], certificate: str, key: str
) -> None:
    """Load the files of these parameters, as far as they are given. Raises BadUrl: one cannot be used."""
    name = ""
    try:
        for name in authorities:
            if name in given:
                context.load_verify_locations(cafile=given[name])
        name = certificate
        if name in given:  # without a password OpenSSL would ask for that of an encrypted key at the terminal
            context.load_cert_chain(given[name], given.get(key), password=lambda: "")
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise BadUrl(f"its {name} (or the key to it) cannot be used: {why}") from error


def _host(text: str) -> Endpoint:
    if text.startswith("["):
        address, bracket, port = text[1:].partition("]")
        if not bracket or (port and not port.startswith(":")):
            raise BadUrl("an IPv6 address stands between [ and ]")
        try:
            name = str(ipaddress.IPv6Address(address))
        except ValueError:
            raise BadUrl("between [ and ] stands no IPv6 address") from None
        return Endpoint(name, parse_port(port[1:]) if port else None)
    name, colon, port = text.partition(":")
    name = _decoded(name)
    if not name.startswith("/") and (len(name) > _MAX_NAME or not _NAME.fullmatch(name)):
        raise BadUrl("a host is missing, or is no host name")
    if ":" in port:
        raise BadUrl(f"an IPv6 address stands between [ and ]; {_ENCODE}")
    return Endpoint(name, parse_port(port) if colon else None)


def _parameters(query: str, known: Collection[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name not in known:
            raise BadUrl(f"it has a parameter that is not known; known are {', '.join(known)}")
        if name in found or not value:
            raise BadUrl(f"it has {name} twice, or without a value")
        found[name] = _decoded(value)
    return found


def _decoded(text: str) -> str:
    try:
        decoded = unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise BadUrl("a percent-encoded part is not UTF-8") from None
    if not decoded.isprintable():
        raise BadUrl("a percent-encoded part holds a control character")
    return decoded
