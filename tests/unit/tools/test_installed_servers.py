"""The servers that scripts/test installs before the tests that need them."""

from __future__ import annotations

import re
from pathlib import Path

SCRIPTS = Path(__file__).parents[3] / "scripts"


def test_each_server_that_can_be_installed_is_installed_for_the_tests() -> None:
    """On a machine without a Prometheus two system tests failed: scripts/test had lost the line."""
    can = re.findall(r"^(need_\w+)\(\)", (SCRIPTS / "setup").read_text(), re.MULTILINE)
    does = re.findall(r"^ +(need_\w+)$", (SCRIPTS / "test").read_text(), re.MULTILINE)
    assert "need_prometheus" in can and does == can
