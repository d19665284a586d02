"""Fixtures every test may ask for."""

from __future__ import annotations

import gc
import logging
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.kit import forks, lent, sources
from tests.kit.distribution import READERS, ByFile, in_order, unit_of
from tests.kit.fixtures import (
    amqp,
    amqp_server,
    empty_database,
    lent_databases,
    own_broker,
    postgres_server,
    postgres_url,
)
from tests.kit.turns import unfinished
from tests.kit.waiting import cut_off

# A busy machine fails no property: neither an example nor the drawing of one has a limit by the clock.
settings.register_profile("berth", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)
settings.register_profile("nightly", settings.get_profile("berth"), max_examples=300)

# New objects between two garbage collections. Python's own 700 take a seventh of the processor that the tests take.
ALLOCATIONS = 20_000

# To collect tests takes a tenth longer with garbage collections, which find nothing.
gc.disable()

# Tracebacks are plain, as workers write them: structlog's own take 6 ms of processor each, for colours and variables.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.StackInfoRenderer(),
        structlog.dev.set_exc_info,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

# A process that was started in the background ignores these, and so would every process that a test starts and stops.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="only what is marked so, and more examples of properties")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("nightly" if config.option.nightly else "berth")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def is_wanted(item: pytest.Item) -> bool:
        is_nightly = item.get_closest_marker("nightly") is not None
        return is_nightly or is_property(item) if config.option.nightly else not is_nightly

    wanted = [item for item in items if is_wanted(item)]
    config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
    items[:] = in_order(wanted)


def is_property(item: pytest.Item) -> bool:
    """Whether hypothesis draws its examples."""
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile | None:
    """For `--dist loadscope`, with which scripts/test runs."""
    return ByFile(config, log) if config.option.dist == "loadscope" else None


def pytest_collection_finish() -> None:
    """All that was imported and collected stays to the end: no garbage collection looks at it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS)
    gc.enable()


def pytest_unconfigure() -> None:
    forks.server.close()
    lent.brokers.close()
    lent.databases.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """The test that leaves a task is reported, and not the one in which it is collected."""
    ended = yield
    if unit_of(item.nodeid) == READERS[0] and (nextitem is None or unit_of(nextitem.nodeid) != READERS[0]):
        sources.forget()
    assert (left := unfinished()) == [], f"left on a closed loop: {left}"
    return ended


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A TimeoutError says nothing: what was waited for, and what was there last, is added."""
    report = yield
    if waited := cut_off(call.excinfo.value if call.excinfo else None):
        report.sections.append(("waited at", waited))
    return report


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process configures logging for a stream that is closed after the test."""
    configured, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.configure(**configured)
    root.handlers, root.level = handlers, level


__all__ = [
    "amqp",
    "amqp_server",
    "empty_database",
    "lent_databases",
    "own_broker",
    "postgres_server",
    "postgres_url",
]
