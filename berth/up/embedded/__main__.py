"""`python -m berth.up.embedded -- COMMAND`: run a command with a private broker and database, gone when it ends.

AMQP_URL and DATABASE_URL give the command their addresses. One that is set already is used and its server not started.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from berth.config.ports import ServerFailed
from berth.up.embedded.postgres import Postgres
from berth.up.embedded.process import ServerMissing
from berth.up.embedded.rabbitmq import RabbitMQ

EXIT_NO_SERVER = 3


def main(arguments: list[str] | None = None) -> int:
    """Start missing servers, run the command, return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m berth.up.embedded", description=__doc__)
    parser.add_argument("--durable", action="store_true", help="PostgreSQL with fsync, as in production")
    parser.add_argument("--postgresql", type=Path, help="the directory of another PostgreSQL's programs")
    parser.add_argument("--broker-threads", type=int, help="that run RabbitMQ's processes (one for each processor)")
    parser.add_argument("command", nargs="+", help="the command to run, after --")
    given = parser.parse_args(arguments)
    environment = dict(os.environ)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # while starting: leave in good order
    with ExitStack() as servers:
        try:
            if not environment.get("DATABASE_URL"):
                environment["DATABASE_URL"] = servers.enter_context(
                    Postgres(durable=given.durable, binaries=given.postgresql)
                ).url()
            if not environment.get("AMQP_URL"):
                environment["AMQP_URL"] = servers.enter_context(RabbitMQ(schedulers=given.broker_threads)).url()
        except (ServerFailed, ServerMissing) as error:
            sys.stderr.write(f"{error}\n")
            return EXIT_NO_SERVER
        return _run(given.command, environment)


def _run(command: list[str], environment: dict[str, str]) -> int:
    child = subprocess.Popen(command, env=environment)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        child.send_signal(number)

    # Ctrl-C reaches the child by itself (it shares the terminal); we outlive it to stop the servers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, pass_on)
    status = child.wait()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
