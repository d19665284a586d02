"""Boots a second through the whole street, as processes on real servers (or in one process over memory).

    scripts/street [--boots N] [--hosts N] [--cells N] [--only real|memory|both] [--json FILE]

Real: each worker its own process, a private RabbitMQ (quorum queues, confirms, a virtual host per bus) and a private
PostgreSQL (fsync on), workers, servers and the client all on this machine. Hosts build at once: what is measured is
the street. One boot alone on the idle system is measured as well, and the invariants are judged after each run.
Memory: every worker in this process, memory buses, an embedded PostgreSQL.

With --moves N so many of the booted instances are live-migrated at once, before the invariants are judged.

Real also prints what a boot costs: CPU of every process, broker messages, transactions, statements (counted by
pg_stat_statements, which Debian's PostgreSQL has and the wheel's has not); latency at 50 % and 80 % of the highest
rate; and the bare five-hop pipeline on the same broker (lab/benchmarks/bare.py) in the same run. Each can be left out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from bus.service.telemetry import configure_logging
from lab.benchmarks.command import parser_of, positive
from lab.benchmarks.street_report import Result, print_result
from lab.benchmarks.street_systems import IDLE_BOOTS, in_memory, on_real_servers


def parser() -> argparse.ArgumentParser:
    """The options. By default everything, on the system that berth is judged by."""
    found = parser_of(__doc__)
    yes_no = argparse.BooleanOptionalAction
    found.add_argument("--boots", type=positive, default=20_000, help="at once, after the idle ones (%(default)s)")
    found.add_argument("--hosts", type=positive, default=10_000, help="in all, rounded up to a multiple of the cells")
    found.add_argument("--cells", type=positive, default=4)
    found.add_argument("--idle", type=positive, default=IDLE_BOOTS, help="boots one at a time, before the load")
    found.add_argument("--pause", type=float, default=0.0, help="seconds of rest before each of those")
    found.add_argument("--schedulers", type=positive, default=1)
    found.add_argument("--placements", type=positive, default=1)
    found.add_argument("--moves", type=int, default=0, help="live migrations at once, after the boots (%(default)s)")
    found.add_argument("--only", choices=("real", "memory", "both"), default="real", help="which system (%(default)s)")
    found.add_argument("--bare", action=yes_no, default=True, help="measure the bare pipeline")
    found.add_argument("--rates", action=yes_no, default=True, help="latency at 50 %% and 80 %% of the highest rate")
    found.add_argument("--statements", action=yes_no, default=True, help="count SQL statements, where it can be done")
    found.add_argument("--profiles", type=Path, help="py-spy's profile of each process under load, in this directory")
    return found


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a command line (None: this process's); ends the process where they are wrong."""
    known = parser()
    options = known.parse_args(arguments)
    try:
        if options.json:
            options.json.open("ab").close()  # found out before minutes of measuring, not after
    except OSError as fault:
        known.error(f"cannot write {options.json}: {fault.strerror}")
    return options


def main() -> int:
    """Print, and write when asked."""
    options = parsed()
    configure_logging(process="bench", role="bench", level="error", style="pretty")
    results: dict[str, Result] = {}
    for name, run in (("memory", in_memory), ("real", on_real_servers)):
        if options.only in {"both", name}:
            started = time.monotonic()
            results[name] = result = uvloop.run(run(options))
            print_result(result, time.monotonic() - started)
    if options.json:
        figures = msgspec.to_builtins(results.get("real") or results["memory"])
        if len(results) > 1:
            figures["memory"] = results["memory"]
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2))
    return 0 if all(result.invariants_hold for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
