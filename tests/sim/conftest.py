from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

from lab.simulation.__main__ import redirect_logs


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """A run's log is its trace; nothing of it is printed."""
    configured = structlog.get_config()
    redirect_logs()
    yield
    structlog.configure(**configured)
    logging.disable(logging.NOTSET)
