from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from berth.sim.__main__ import hush


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A run's log is its story; nothing of it is printed."""
    configured = structlog.get_config()
    hush()
    yield
    structlog.configure(**configured)
    logging.disable(logging.NOTSET)
