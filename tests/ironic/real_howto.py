"""The commands of docs/howto/bare-metal.md, as they stand there, take a reader to a deployed node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import uuid
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "howto" / "bare-metal.md"
LIMIT_S = 270


def test_the_pages_commands_end_with_an_active_build(tmp_path: Path) -> None:
    commands = re.search(r"```sh\n(scripts/ironic run.*?)```", PAGE.read_text(), re.DOTALL)
    assert commands is not None
    directory = f".berth/ironic/{uuid.uuid4().hex[:8]}"  # its own, beside a reader's
    script = commands.group(1).replace(".berth/ironic/run", directory)
    script = script.replace("scripts/ironic run", f"scripts/ironic run --directory {directory}")
    script = script.replace("enroll 2", f"enroll 2 --directory {directory}")
    told = tmp_path / "told"
    with told.open("w") as output:
        running = subprocess.Popen(
            ["bash", "-euc", script],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            status = running.wait(LIMIT_S)
        finally:
            os.killpg(running.pid, signal.SIGTERM)  # the servers that it left in the background
    said = told.read_text()
    assert status == 0, said[-3000:]
    assert re.search(r"active.*bm\.gold|bm\.gold.*active", said), said[-3000:]
