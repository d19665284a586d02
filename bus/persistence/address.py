"""The address of PostgreSQL: one server, or a primary and its standbys; the login, the database, and TLS."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import asyncpg
from asyncpg.exceptions import TargetServerAttributeNotMatched
from asyncpg.protocol import protocol
from msgspec import Struct

from bus.faults import DatabaseForbidden
from bus.server_url import BadUrl, Endpoint, ServerUrl, load_tls_files, parse_hosts, parse_port, parse_server_url

SCHEMES = ("postgresql", "postgres", "postgresql+asyncpg")
SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
TLS = ("sslmode", "sslrootcert", "sslcert", "sslkey", "sslcrl")
# The accepted values of libpq's target_session_attrs. Every worker writes, so other values make no sense.
TARGETS = ("read-write", "primary")
PARAMETERS = ("host", "port", "user", "password", "dbname", *TLS, "target_session_attrs")


# asyncpg asks each element of an array by abstract base classes whether it is an array itself, which is most of what an
# array costs (a text 0.56 instead of 0.12 microseconds). Here lists and tuples are arrays, and nothing else is.
protocol.IterableABC = protocol.SizedABC = (list, tuple)

# Types below are PostgreSQL's own, with one number in every database of every version (access/transam.h,
# FirstGenbkiObjectId).
FIRST_ASSIGNED = 10_000

# By the number of a type: what the catalogue has of it and of the types that it is made of.
_known: dict[int, Sequence[Any]] = {}
# asyncpg prepares its own statement again when an anonymous one took its place; none did.
_NO_STATEMENT = SimpleNamespace(name="known")


class TypedConnection(asyncpg.Connection):  # type: ignore[misc]  # asyncpg has no types
    """A connection that looks up PostgreSQL's own types once in a process, not once a connection: asyncpg looks up each
    array type (`bigint[]`, `uuid[]`) at first use, at 10 ms of the server's time each, and a worker meets six.
    """

    async def _introspect_types(
        self,
        typeoids: Iterable[int],
        timeout: float | None,  # noqa: ASYNC109  (asyncpg's)
    ) -> tuple[Sequence[Any], Any]:
        numbers = sorted(typeoids)
        if any(number >= FIRST_ASSIGNED for number in numbers):
            found: tuple[Sequence[Any], Any] = await super()._introspect_types(numbers, timeout)
            return found
        statement: Any = _NO_STATEMENT
        for number in numbers:
            if number not in _known:
                _known[number], statement = await super()._introspect_types([number], timeout)
        return [row for number in numbers for row in _known[number]], statement


class ServerUntrusted(ConnectionError):
    """The server's certificate does not satisfy sslmode."""


# The errors of asyncpg when no connection can be made, or a session ends under a statement. InternalClientError: the
# server closed the session at the moment of the next statement, where asyncpg expects no message.
CONNECTION_LOST = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)


class DatabaseAddress(Struct, frozen=True, kw_only=True):
    """The servers of one database, and the login."""

    hosts: tuple[Endpoint, ...]  # empty for asyncpg's default, which is libpq's
    user: str | None
    password: str | None
    database: str | None
    tls: dict[str, str]
    target: str

    def __str__(self) -> str:
        """For logs: no password."""
        return f"{self.user or ''}@{','.join(map(str, self.hosts))}/{self.database or ''}"

    async def connect(
        self, *, timeout_s: float, command_timeout_s: float | None, settings: Mapping[str, str]
    ) -> asyncpg.Connection:
        """Connect to the first server that accepts writes, with `timeout_s` seconds for each server. Raises asyncpg's
        errors, ServerUntrusted, ConnectionError (no writes); of several errors, one that a wait may help against.
        """
        errors: list[Exception] = []
        for host in self.hosts or (None,):
            try:
                return await self._one(host, timeout_s, command_timeout_s, settings)
            except CONNECTION_LOST as error:
                errors.append(error)
        raise next((error for error in errors if not _is_persistent(error)), errors[-1])

    async def _one(
        self, host: Endpoint | None, timeout_s: float, command_timeout_s: float | None, settings: Mapping[str, str]
    ) -> asyncpg.Connection:
        try:
            return await asyncpg.connect(
                f"postgresql://?{urlencode(self.tls)}" if self.tls else None,
                host=host.name if host else None,
                port=host.port if host else None,
                user=self.user,
                password=self.password,
                database=self.database,
                timeout=timeout_s,
                command_timeout=command_timeout_s,
                server_settings=dict(settings),
                target_session_attrs=self.target,
                connection_class=TypedConnection,
            )
        except ssl.SSLCertVerificationError as error:
            raise ServerUntrusted(f"the certificate of {host} is refused: {error.verify_message}") from error
        except TargetServerAttributeNotMatched as error:
            raise ConnectionError(f"{host or 'the server'} takes no writes") from error


def parse_database_url(text: str) -> DatabaseAddress:
    """Parse `postgresql://user:password@host:port,host:port/database?sslmode=...`, as libpq does.

    Raises DatabaseForbidden (`database.url`), which shows no part of it.
    """
    try:
        url = parse_server_url(text, schemes=SCHEMES, parameters=PARAMETERS)
        address = _address(url)
        # asyncpg reports a missing file like an unavailable server.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_tls_files(context, address.tls, authorities=("sslrootcert", "sslcrl"), certificate="sslcert", key="sslkey")
    except BadUrl as error:
        form = "postgresql://user:password@host:port/database"
        raise DatabaseForbidden(
            f"a database is at `{form}`, hosts with a comma between: {error}", code="database.url"
        ) from None
    return address


def _address(url: ServerUrl) -> DatabaseAddress:
    given = url.parameters
    target = given.get("target_session_attrs", TARGETS[0])
    if target not in TARGETS:
        raise BadUrl(f"target_session_attrs is one of {', '.join(TARGETS)}: every worker writes")
    tls = {name: given[name] for name in TLS if name in given}
    if tls.get("sslmode", SSL_MODES[0]) not in SSL_MODES:
        raise BadUrl(f"sslmode is one of {', '.join(SSL_MODES)}")
    if tls.get("sslmode", "").startswith("verify-") and "sslrootcert" not in tls:
        raise BadUrl("sslmode=verify-ca and verify-full need sslrootcert, the file of the CA")
    return DatabaseAddress(
        hosts=_hosts(url),
        user=given.get("user", url.user),
        password=given.get("password", url.password),
        database=given.get("dbname", url.name),
        tls=tls,
        target=target,
    )


def _hosts(url: ServerUrl) -> tuple[Endpoint, ...]:
    """Return the hosts of the authority, or else of the parameter `host`. The parameter `port` has one port for all, or
    one for each.
    """
    given = url.parameters
    hosts = url.hosts or parse_hosts(given.get("host", ""))
    ports = [parse_port(port) for port in given.get("port", "").split(",") if port]
    if not ports:
        return hosts
    if not hosts or len(ports) not in (1, len(hosts)):
        raise BadUrl("port needs a host; it is one for all hosts, or one for each")
    each = ports * len(hosts) if len(ports) == 1 else ports
    return tuple(Endpoint(host.name, host.port or port) for host, port in zip(hosts, each, strict=True))


def _is_persistent(error: Exception) -> bool:
    """Whether a wait does not help: the login or the certificate is wrong."""
    return isinstance(error, ServerUntrusted | asyncpg.InvalidAuthorizationSpecificationError)
