"""Fixtures every test may ask for."""

from __future__ import annotations

from tests.kit.fixtures import amqp, amqp_server, own_broker, postgres_server, postgres_url

__all__ = ["amqp", "amqp_server", "own_broker", "postgres_server", "postgres_url"]
