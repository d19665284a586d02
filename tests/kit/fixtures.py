"""Fixtures for the real servers. Every test gets its own database, its own name space on the broker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from berth.up.embedded.rabbitmq import RabbitMQ
from tests.kit import lent, servers
from tests.kit.databases import LentDatabases


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of the session's PostgreSQL (an administration database)."""
    with servers.postgres_server() as url:
        yield url


@pytest.fixture(scope="session")
def lent_databases(postgres_server: str) -> Iterator[LentDatabases]:
    """The databases that the tests of this process have one after the other."""
    made = LentDatabases(postgres_server)
    yield made
    made.close()


@pytest.fixture
def postgres_url(lent_databases: LentDatabases) -> Iterator[str]:
    """URL of a database that is this test's own. The workers' schemas are migrated, and as a new one's."""
    with lent_databases.lend() as url:
        yield url


@pytest.fixture
def empty_database(postgres_server: str) -> Iterator[str]:
    """URL of a database of this test's own without any schema."""
    with servers.fresh_database(postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def amqp_server() -> Iterator[str]:
    """URL of the session's RabbitMQ."""
    with servers.amqp_server() as url:
        yield url


@pytest.fixture
def amqp(amqp_server: str) -> tuple[str, str]:
    """(url, prefix): the shared broker, and a prefix for this test's exchanges and queues."""
    return amqp_server, f"t{uuid.uuid4().hex[:10]}."


@pytest.fixture
def own_broker() -> Iterator[RabbitMQ]:
    """A RabbitMQ that this test alone uses: add vhosts and users, kill it, start it again."""
    with lent.brokers.lend() as broker:
        yield broker
