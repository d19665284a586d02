"""Log lines as a terminal may have them."""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import structlog

from bus.service.telemetry import configure_logging
from bus.tracing.context import CURRENT, Scope, TraceContext
from bus.tracing.tracer import Tracer


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


@pytest.mark.parametrize("style", ["pretty", "json"])
def test_the_log_of_an_exception_has_no_values_of_variables(style: Literal["pretty", "json"]) -> None:
    """A request's headers were among them: tokens and cookies."""
    stream = io.StringIO()
    configure_logging(process="p", role="r", style=style, stream=stream)
    headers = {"authorization": "Bearer " + "operator's".upper()}
    try:
        headers["missing"]
    except KeyError:
        structlog.get_logger().exception("web.crashed")
    assert "KeyError" in stream.getvalue() and "OPERATOR'S" not in stream.getvalue()


def test_a_full_disk_costs_lines_and_ends_nothing(tmp_path: Path) -> None:
    """Each task that logged ended, that which connects to the broker again among them: the worker stayed deaf."""
    path = tmp_path / "log"
    with path.open("w", buffering=1) as stream, Path("/dev/full").open("w") as full:
        configure_logging(process="p", role="r", style="json", stream=stream)
        log, room = structlog.get_logger(), os.dup(stream.fileno())
        log.info("before")
        os.dup2(full.fileno(), stream.fileno())
        for _ in range(1000):
            log.warning("bus.unavailable", reason="x" * 1000)
        logging.getLogger("foreign").warning("logged by a library")
        os.dup2(room, stream.fileno())
        os.close(room)
        log.info("after")
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    assert lines[0]["event"] == "before"
    assert lines[-1]["event"] == "after"
    assert any(line["event"] == "log.lines_lost" and line["lines"] > 0 for line in lines)


def test_a_line_about_a_sampled_build_has_its_trace_id() -> None:
    stream = io.StringIO()
    configure_logging(process="p", role="scheduler", style="json", stream=stream)
    tracer = Tracer(None, ratio=0.0, most_per_s=1.0)  # type: ignore[arg-type]  (nothing is exported)
    token = CURRENT.set(Scope(tracer.start, {"sampled": TraceContext("a" * 32, "b" * 16)}, None))
    for cause in ("sampled", "other"):
        structlog.get_logger().info("claimed", cause=cause)
    CURRENT.reset(token)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line.get("trace_id") for line in lines] == ["a" * 32, None]
