"""The private servers of this process of pytest: one broker and one database server, lent to one test after the other.

Starting a broker takes three seconds of processor, a virtual host a hundredth of that. Faults are not shared: nothing
else uses the server while a test has it. One that a test restarted is cleaned and lent again; one that a test left
stopped, or that cannot be cleaned, is not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Generic, TypeVar

from sqlalchemy.engine import make_url

from berth.trial.embedded.postgres import Postgres
from berth.trial.embedded.process import ServerFailed
from berth.trial.embedded.rabbitmq import ADMIN, RabbitMQ
from berth.trial.servers import RealServers
from tests.kit.servers import fresh_database

# The content of a new broker: the administrator with its password, the virtual host `/`, its own limit of memory. The
# replicas of quorum queues end after their queues: one of the same name that was declared before that had none for ever
# (INTERNAL_ERROR).
AS_NEW = f"""
    By = <<"tests">>,
    [rabbit_vhost:delete(Name, By) || Name <- rabbit_vhost:list_names()],
    Ended = fun Ended(Left) ->
        case ra_directory:list_registered(quorum_queues) of
            [] -> ok;
            _ when Left > 0 -> timer:sleep(20), Ended(Left - 1)
        end
    end,
    ok = Ended(1000),
    [rabbit_auth_backend_internal:delete_user(Name, By)
        || User <- rabbit_auth_backend_internal:list_users(), Name <- [proplists:get_value(user, User)],
           Name =/= <<"{ADMIN}">>],
    vm_memory_monitor:set_vm_memory_high_watermark({{absolute, "2GB"}}),
    rabbit_vhost:add(<<"/">>, By),
    rabbit_auth_backend_internal:change_password(<<"{ADMIN}">>, <<"%s">>, By),
    rabbit_auth_backend_internal:set_permissions(<<"{ADMIN}">>, <<"/">>, <<".*">>, <<".*">>, <<".*">>, By).
"""

Server = TypeVar("Server", RabbitMQ, Postgres)


class Lender(Generic[Server]):
    """One server, started when first asked for. clean: makes it as new; a server that it cannot clean goes."""

    def __init__(self, make: Callable[[], Server], clean: Callable[[Server], object]) -> None:
        self._make = make
        self._clean = clean
        self._kept: Server | None = None  # and free

    @contextlib.contextmanager
    def lend(self) -> Iterator[Server]:
        """The server, for the block alone; another one while it is lent already."""
        server, self._kept = self._kept or self._make().start(), None
        try:
            yield server
        finally:
            if self._kept is None and server.pid and self._cleaned(server):
                self._kept = server
            else:
                server.stop()

    def keep(self, server: Server) -> None:
        """Lend this one next."""
        self._kept = server

    def close(self) -> None:
        """Stop it."""
        if self._kept is not None:
            self._kept.stop()
        self._kept = None

    def _cleaned(self, server: Server) -> bool:
        try:
            self._clean(server)
        except ServerFailed:
            return False
        return True


def as_new(broker: RabbitMQ) -> None:
    """Leave of a broker what a new one has. Raises ServerFailed."""
    broker.evaluate(AS_NEW % broker.password)


brokers = Lender(partial(RabbitMQ, schedulers=1), as_new)
# Each has a database of its own there, which is dropped: nothing is left to clean.
databases = Lender(Postgres, lambda _: None)


@contextlib.contextmanager
def lent_servers(cells: tuple[str, ...]) -> Iterator[RealServers]:
    """As `berth.trial.servers.real_servers`, not durable: a virtual host per bus, and an empty database."""
    with brokers.lend() as broker, databases.lend() as postgres, fresh_database(postgres.url()) as url:
        yield RealServers(broker, postgres, cells, database=make_url(url).database or "")
