from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from lab.simulation.__main__ import redirect_logs
from tests.kit.distribution import drawn


def pytest_addoption(parser: pytest.Parser) -> None:
    """Of scripts/mutants."""
    parser.addoption("--share", type=int, default=1, metavar="N", help="one Nth of the tests, drawn by --of")
    parser.addoption("--of", default="", metavar="HASH", help="the commit's hash that --share draws by")


def pytest_report_header(config: pytest.Config) -> str | None:
    """So that a log shows which tests a run had."""
    share, by = config.getoption("--share", 1), config.getoption("--of", "")
    return f"one test of {share}, drawn by {by}" if share > 1 else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, by = config.getoption("--share", 1), config.getoption("--of", "")
    if share > 1:
        kept = drawn([item.nodeid for item in items], share, by)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A run's log is its trace; nothing of it is printed."""
    configured = structlog.get_config()
    redirect_logs()
    yield
    structlog.configure(**configured)
    logging.disable(logging.NOTSET)
