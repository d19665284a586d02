"""A process of Nova's Python that an oracle speaks JSON lines with."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import coverage


class Nova:
    """The process: `python script command`."""

    def __init__(self, python: str, script: Path, command: str) -> None:
        self._process = subprocess.Popen(
            [python, str(script), command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, "COVERAGE_IN": str(Path(coverage.__file__).parents[1])},
        )

    def say(self, line: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"Nova's side has ended with status {self._process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
