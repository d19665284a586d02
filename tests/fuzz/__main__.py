"""Hostile input at berth's doors, from a seed. See scripts/nightly fuzz.

A door in this process takes one input as a worker does in one callback of its event loop: what raises has ended a
worker, and what takes longer than LIMIT_S of processor time has held up its loop. Processor time, because the machine
may be busy; the best of a few, because a collection of garbage is no fault of an input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import structlog

from tests.fuzz import live
from tests.fuzz.doors import DOORS, Door
from tests.fuzz.web import web

LIMIT_S = 0.1
AGAIN = 3  # an input that took too long is taken so many times more
MAX_DEFECTS = 20  # of a door; then it is given up
LIVE = {**live.DOORS, "web": web}
ALL = (*DOORS, *LIVE)
# Shares of the inputs. The journals write files, and each of the live doors needs real servers.
SHARES = {"amqp": 40, "notifications": 20, "settings": 8, "journals": 4, "rest": 28}
LIVE_INPUTS = 1_500


def tried(name: str, door: Door, seed: int, numbers: range, until: float) -> dict[str, Any]:
    """The results of these inputs of one door."""
    defects: list[dict[str, Any]] = []
    count, slowest, slowest_at, began = 0, 0.0, -1, time.monotonic()
    for number in numbers:
        given = door.make(random.Random(f"{seed}/{name}/{number}"))
        count += 1
        took, wrong = _take(door, given)
        if took > LIMIT_S:
            took = min(took, *(_take(door, given)[0] for _ in range(AGAIN)))
        if took > slowest:
            slowest, slowest_at = took, number
        if took > LIMIT_S:
            wrong = f"{took * 1000:.0f} ms of processor time"
        if wrong:
            defects.append({"number": number, "wrong": wrong, "input": repr(given)[:2_000]})
        if len(defects) >= MAX_DEFECTS or time.monotonic() > until:
            break
    return {
        "inputs": count,
        "defects": defects,
        "slowest_ms": round(slowest * 1000, 2),
        "slowest_number": slowest_at,
        "seconds": round(time.monotonic() - began, 1),
    }


def _take(door: Door, given: Any) -> tuple[float, str]:
    began = time.thread_time()
    try:
        door.take(given)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return time.thread_time() - began, f"{type(error).__name__}: {str(error)[:500]} ({where})"
    return time.thread_time() - began, ""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/nightly fuzz", description="Hostile input at berth's doors.")
    parser.add_argument("doors", nargs="*", metavar="door", help=f"of {', '.join(ALL)}; all when none is named")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inputs", type=int, default=100_000, help="in all, besides those of the live doors")
    parser.add_argument("--live-inputs", type=int, default=LIVE_INPUTS, help="of each live door")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="the doors in this process end after so long")
    parser.add_argument("--only", type=int, help="one input of one door, by its number: to see a defect again")
    parser.add_argument("--json", type=Path, help="write what was done there")
    options = parser.parse_args()
    unknown = {*options.doors} - {*ALL}
    if unknown:
        parser.error(f"no such door: {', '.join(sorted(unknown))}; there are: {', '.join(ALL)}")
    return options


def main() -> int:
    """0 when inputs were taken at each door and nothing was wrong."""
    options = _options()
    logging.disable()  # uvicorn's: a line for each broken request
    structlog.configure(processors=[_nothing], logger_factory=structlog.ReturnLoggerFactory())
    chosen = options.doors or ALL
    doors: dict[str, Any] = {}
    left = {name: share for name, share in SHARES.items() if name in chosen}
    total, until = sum(left.values()), time.monotonic() + options.seconds
    while left:
        name, share = next(iter(left.items()))
        ends = time.monotonic() + (until - time.monotonic()) * share / sum(left.values())
        numbers = _numbers(options, max(1, options.inputs * share // total))
        doors[name] = tried(name, DOORS[name](), options.seed, numbers, ends)
        _print_door(name, doors[name])
        del left[name]
    for name, door in LIVE.items():
        if name in chosen:
            doors[name] = asyncio.run(door(options.seed, _numbers(options, options.live_inputs)))
            _print_door(name, doors[name])
    summary = summed(options.seed, doors)
    if options.json:
        options.json.write_text(json.dumps(summary, indent=1))
    sys.stdout.write(json.dumps({key: value for key, value in summary.items() if key != "doors"}) + "\n")
    return 0 if summary["passed"] else 1


def summed(seed: int, doors: dict[str, Any]) -> dict[str, Any]:
    """The results of all doors; passed when each took something and nothing was wrong."""
    inputs = sum(result["inputs"] for result in doors.values())
    defects = sum(len(result["defects"]) for result in doors.values())
    passed = bool(doors) and not defects and all(result["inputs"] > 0 for result in doors.values())
    return {"passed": passed, "seed": seed, "inputs": inputs, "defects": defects, "doors": doors}


def _numbers(options: argparse.Namespace, count: int) -> range:
    return range(count) if options.only is None else range(options.only, options.only + 1)


def _print_door(name: str, result: dict[str, Any]) -> None:
    figures = ", ".join(f"{key} {value}" for key, value in result.items() if key not in {"inputs", "defects"})
    sys.stderr.write(f"{name}: {result['inputs']} inputs, {len(result['defects'])} defects, {figures}\n")
    for defect in result["defects"]:
        sys.stderr.write(f"  --only {defect['number']} {name}: {defect['wrong']}\n    {defect['input'][:300]}\n")


def _nothing(_logger: object, _method: str, _event: object) -> str:
    raise structlog.DropEvent


if __name__ == "__main__":
    sys.exit(main())
