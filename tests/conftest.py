"""Fixtures every test may ask for."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.kit.fixtures import amqp, amqp_server, own_broker, postgres_server, postgres_url

# A busy machine fails no property: neither an example nor the drawing of one has a limit by the clock.
settings.register_profile("berth", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("berth")

__all__ = ["amqp", "amqp_server", "own_broker", "postgres_server", "postgres_url"]
