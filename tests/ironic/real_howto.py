"""The commands of docs/operate/bare-metal.md, as they stand there, take a reader to a deployed node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "operate" / "bare-metal.md"
LIMIT_S = 400.0
PAGES_DIRECTORY = ".berth/ironic/run"
TERMINALS = 3


class Terminal:
    """A shell that runs lines of the page in its own session."""

    def __init__(self, lines: str, log: Path) -> None:
        self.log = log
        with log.open("w") as output:
            self._running = subprocess.Popen(
                ["bash", "-euc", lines],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def until(self, there: Callable[[], bool]) -> None:
        limit = time.monotonic() + LIMIT_S
        while not there():
            assert self._running.poll() in {None, 0}, self.printed
            assert time.monotonic() < limit, self.printed
            time.sleep(0.2)

    def wait(self) -> int:
        return self._running.wait(LIMIT_S)

    def close(self) -> None:
        if self._running.poll() is None:
            os.killpg(self._running.pid, signal.SIGINT)  # Ctrl-C
            self.wait()

    @property
    def printed(self) -> str:
        return self.log.read_text()[-3000:]


@pytest.fixture
def blocks() -> list[str]:
    """The page's first shell blocks, with a directory of their own beside a reader's."""
    directory = f".berth/ironic/{uuid.uuid4().hex[:8]}"
    found = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)[:TERMINALS]
    found = [block.replace(PAGES_DIRECTORY, directory) for block in found]
    found = [re.sub(r"(scripts/nightly ironic (run|enroll))", rf"\1 --directory {directory}", block) for block in found]
    return [directory, *found]


def test_the_pages_commands_end_with_an_active_build(blocks: list[str], tmp_path: Path) -> None:
    directory, first, second, third = blocks
    terminals = [Terminal(first, tmp_path / "1")]
    try:
        terminals[0].until((ROOT / directory / "url").exists)
        terminals.append(Terminal(second, tmp_path / "2"))
        terminals[1].until(lambda: "berth is up" in terminals[1].printed)
        terminals.append(Terminal(third, tmp_path / "3"))
        status = terminals[2].wait()
        assert status == 0, terminals[2].printed + terminals[1].printed
        assert re.search(r"active", terminals[2].printed) and "baremetal-gold" in terminals[2].printed
    finally:
        for terminal in reversed(terminals):
            terminal.close()
