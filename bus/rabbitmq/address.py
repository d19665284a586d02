"""Where RabbitMQ is: one broker or the nodes of a cluster, the login, the virtual host, and TLS."""

from __future__ import annotations

import ssl
from urllib.parse import quote, urlsplit, urlunsplit

from msgspec import Struct
from yarl import URL

from bus.server_url import BadUrl, Endpoint, load_tls_files, parse_server_url
from bus.transport import BusForbidden

SCHEMES = ("amqp", "amqps")
PORTS = {"amqp": 5672, "amqps": 5671}
# RabbitMQ's own names (its "URI query parameters"); cafile is aio-pika's word for cacertfile.
AUTHORITIES = ("cacertfile", "cafile")
PARAMETERS = (*AUTHORITIES, "certfile", "keyfile", "verify")
MAX_VHOST = 127  # as AMQP bounds a path
VERIFY = ("verify_peer", "verify_none")


class BadBusUrl(BusForbidden):
    """The URL of a bus cannot be used: it is none, or a file that it names cannot be read."""

    code = "bus.url"


def with_vhost(url: str, vhost: str) -> str:
    """The URL of another virtual host of the same broker."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path="/" + quote(vhost, safe="")))


class BrokerAddress(Struct, frozen=True, kw_only=True):
    """The nodes of one broker and how to enter it. Any of them will do: they hold the same queues."""

    scheme: str
    hosts: tuple[Endpoint, ...]
    user: str
    password: str
    vhost: str
    parameters: dict[str, str]

    def url(self, host: Endpoint, **query: str) -> URL:
        """The URL of one node, as aio-pika takes it."""
        login = ":".join(quote(word, safe="") for word in (self.user, self.password))
        where = Endpoint(host.name, host.port or PORTS[self.scheme])
        return URL(f"{self.scheme}://{login}@{where}/{quote(self.vhost, safe='')}", encoded=True).with_query(query)

    def tls(self) -> ssl.SSLContext | None:
        """The client's side of TLS; None for amqp://. Raises BadBusUrl: a file that it needs cannot be read."""
        if self.scheme != "amqps":
            return None
        given = self.parameters
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if given.keys().isdisjoint(AUTHORITIES):
            context.load_default_certs()
        try:
            load_tls_files(context, given, authorities=AUTHORITIES, certificate="certfile", key="keyfile")
        except BadUrl as error:
            raise BadBusUrl(str(error)) from error
        if given.get("verify") == "verify_none":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


def parse_bus_url(text: str) -> BrokerAddress:
    """`amqp://user:password@host:port,host:port/vhost`, or amqps://. Raises BadBusUrl, which shows no part of it."""
    try:
        url = parse_server_url(text, schemes=SCHEMES, parameters=PARAMETERS)
        if not url.hosts or any(host.name.startswith("/") for host in url.hosts):
            raise BadUrl("a host is missing, or is no host name")
        given = url.parameters
        if given and url.scheme != "amqps":
            raise BadUrl(f"{', '.join(given)}: for amqps:// only")
        if given.get("verify", VERIFY[0]) not in VERIFY:
            raise BadUrl(f"verify is one of {', '.join(VERIFY)}")
        if "keyfile" in given and "certfile" not in given:
            raise BadUrl("keyfile without certfile")
        if url.name and len(url.name) > MAX_VHOST:
            raise BadUrl(f"a virtual host has at most {MAX_VHOST} letters")
    except BadUrl as error:
        form = "amqp://user:password@host:port/vhost"
        raise BadBusUrl(f"a bus is at `{form}`, hosts with a comma between, or at amqps://: {error}") from None
    address = BrokerAddress(
        scheme=url.scheme,
        hosts=url.hosts,
        user=url.user or "guest",
        password="guest" if url.password is None else url.password,
        vhost=url.name or "/",
        parameters=url.parameters,
    )
    address.tls()
    return address
