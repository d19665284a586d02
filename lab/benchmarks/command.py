"""A benchmark as a program: its options, and its figures as JSON."""

from __future__ import annotations

import argparse
import math
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from bus.service.telemetry import configure_logging

T = TypeVar("T")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the option that every benchmark has."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", type=Path, help="write the figures here")
    return found


def positive(text: str) -> int:
    """A number of things."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


def rates(text: str) -> list[float]:
    """`5,20,70` as rates a second."""
    found = [float(rate) for rate in text.split(",")]
    if not all(0 < rate < math.inf for rate in found):
        raise argparse.ArgumentTypeError(f"rates are above 0: {text!r}")
    return found


def measured(work: Coroutine[Any, Any, T]) -> T:
    """The figures of a benchmark that is run."""
    configure_logging(process="bench", role="bench", level="error", style="pretty")
    return uvloop.run(work)


def as_json(figures: object) -> bytes:
    """Figures as they are written."""
    return msgspec.json.format(msgspec.json.encode(figures), indent=2)


def write(figures: object, file: Path | None) -> None:
    """Write figures where a file is named."""
    if file is not None:
        file.write_bytes(as_json(figures))
