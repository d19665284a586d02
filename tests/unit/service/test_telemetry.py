"""Log lines as a terminal may have them."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest
import structlog

from bus.service.telemetry import configure_logging


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    structlog.configure(**before)
    root.handlers, root.level = handlers, level


def test_a_value_forges_no_line_of_a_persons_log() -> None:
    stream = io.StringIO()
    configure_logging(process="p", role="r", style="pretty", stream=stream)
    structlog.get_logger().info("host.new", name="h1\n2026 [error] all hosts lost\x1b[2J\u202e")
    line = stream.getvalue()
    assert line.count("\n") == 1 and r"\n2026" in line
    assert line.rstrip("\n").isprintable()
