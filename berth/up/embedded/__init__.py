"""Private servers for a first look and for tests: PostgreSQL from a wheel, RabbitMQ from the distribution."""

from __future__ import annotations
