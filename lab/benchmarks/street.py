"""Measures boots a second through the whole system, as processes on real servers.

    scripts/street [--boots N] [--hosts N] [--cells N] [--json FILE]

Each worker is its own process, on a private RabbitMQ (quorum queues, confirms, a virtual host per bus) and a private
PostgreSQL (fsync on); workers, servers and the client are all on this computer. Hosts build at once: what is measured
is berth. One boot alone on the idle system is measured as well, and latency at 50 %, 80 % and 5 % of the highest rate
(or at the rates of --held). The invariants are judged at the end.

Every load also prints what a boot of it costs: CPU and wake-ups of the processes, broker messages, flushes,
transactions, and statements (counted by pg_stat_statements, which Debian's PostgreSQL has and the wheel's has not). The
bare five-hop pipeline on the same broker (lab/benchmarks/bare.py) is measured in the same run. Exit status 1: an
invariant does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

from berth.up.servers import real_servers, running_processes
from lab.benchmarks import bare
from lab.benchmarks.command import measured, parser_of, positive, rates, write
from lab.benchmarks.costs import Instruments
from lab.benchmarks.street_report import Result, print_result
from lab.benchmarks.street_systems import COUNTING, Street, connected, counting_binaries, plan_of, progress
from lab.feed_watch import RecordingClient

BARE_BOOTS = 4000


def parsed() -> argparse.Namespace:
    """The options. By default everything, on the system that berth is judged by."""
    found = parser_of(__doc__)
    yes_no = argparse.BooleanOptionalAction
    found.add_argument("--boots", type=positive, default=20_000, help="at once, after the idle ones (%(default)s)")
    found.add_argument("--hosts", type=positive, default=10_000, help="in all, rounded up to a multiple of the cells")
    found.add_argument("--cells", type=positive, default=4)
    found.add_argument("--idle", type=positive, default=100, help="boots one at a time, before the load (%(default)s)")
    found.add_argument("--schedulers", type=positive, default=1)
    found.add_argument("--placements", type=positive, default=1)
    found.add_argument("--bare", action=yes_no, default=True, help="measure the bare pipeline")
    found.add_argument("--rates", action=yes_no, default=True, help="hold shares of the highest rate")
    found.add_argument("--held", type=rates, default=[], help="hold these rates instead, as 5,20,70 boots a second")
    options = found.parse_args()
    try:
        if options.json:
            options.json.open("ab").close()  # found out before minutes of measuring, not after
    except OSError as fault:
        found.error(f"cannot write {options.json}: {fault.strerror}")
    return options


async def measure(options: argparse.Namespace) -> Result:
    """All of it, on servers of its own."""
    plan = plan_of(options.hosts, options.cells, schedulers=options.schedulers, placements=options.placements)
    counting = counting_binaries()
    if counting is None:
        progress("SQL statements are not counted: there is no PostgreSQL with pg_stat_statements here")
    progress("starting RabbitMQ and PostgreSQL")
    async with contextlib.AsyncExitStack() as stack:
        settings = {} if counting is None else COUNTING
        servers = stack.enter_context(real_servers(plan.cells, durable=True, binaries=counting, settings=settings))
        pipeline, plain = None, None
        if options.bare:
            progress(f"the bare pipeline: {BARE_BOOTS:,} boots through five hops")
            pipeline = await stack.enter_async_context(bare.running(servers.urls["berth"]))
            plain = await pipeline.measure(BARE_BOOTS, options.idle)
        progress("starting the workers")
        async with running_processes(servers, plan) as (processes, here), connected(here, RecordingClient) as client:
            instruments = Instruments(servers, processes, counts_statements=counting is not None)
            street = Street(client, here, plan, instruments, pipeline)
            return await street.measure(options.boots, options.idle, plain, shares=options.rates, held=options.held)


def main() -> int:
    """Print, and write when asked."""
    options, started = parsed(), time.monotonic()
    result = measured(measure(options))
    print_result(result, time.monotonic() - started)
    write(result, options.json)
    return 0 if result.invariants_hold else 1


if __name__ == "__main__":
    sys.exit(main())
