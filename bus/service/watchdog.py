"""Watchdog pings for this process's supervisor, sent by its event loop: the protocol of systemd's `sd_notify`.

A loop that stands still sends none, and is then ended with SIGABRT: the stack of every thread goes to standard error.
Without NOTIFY_SOCKET and WATCHDOG_USEC in the environment nothing is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import socket
from collections.abc import AsyncIterator, Mapping

import structlog
from msgspec import Struct

PING = b"WATCHDOG=1"
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
PINGS_PER_LIMIT = 4  # so that a late or lost one ends no process
MAX_LIMIT_S = 24 * 3600.0
STANDARD_ERROR = 2

log = structlog.get_logger(__name__)


class Watchdog(Struct, frozen=True):
    """The receiver of watchdog pings: the address of a datagram socket, and the seconds without one that end the
    process.
    """

    address: str
    limit_s: float


def watchdog_of(environment: Mapping[str, str], *, pid: int) -> Watchdog | None:
    """The supervisor's variables in the environment; None when it wants no pings, or those of another process."""
    address, limit = environment.get("NOTIFY_SOCKET", ""), environment.get("WATCHDOG_USEC", "")
    if address[:1] not in {"/", "@"} or not (limit.isascii() and limit.isdigit()):
        return None
    if environment.get("WATCHDOG_PID", "") not in {"", str(pid)}:
        return None
    limit_s = int(limit[:20]) / 1e6
    return Watchdog(address, limit_s) if 0.0 < limit_s <= MAX_LIMIT_S else None


@contextlib.asynccontextmanager
async def watched_loop(watchdog: Watchdog | None) -> AsyncIterator[None]:
    """Send watchdog pings from the running loop for as long as the block runs."""
    if watchdog is None:
        yield
        return
    sending = asyncio.create_task(_send_pings(watchdog), name="watchdog")
    try:
        yield
    finally:
        sending.cancel()


def show_stacks_on_abort() -> None:
    """Print the stack of every thread when this process is ended by SIGABRT or crashes."""
    faulthandler.enable(STANDARD_ERROR)


async def _send_pings(watchdog: Watchdog) -> None:
    address = f"\0{watchdog.address[1:]}" if watchdog.address[0] == "@" else watchdog.address
    is_received = True
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.setblocking(False)
        while True:
            try:
                sender.sendto(PING, address)
            except BlockingIOError:
                pass  # the supervisor has not read the last ones yet
            except OSError as error:
                if is_received:
                    log.warning("watchdog.not_received", address=watchdog.address, reason=str(error))
                is_received = False
            else:
                is_received = True
            await asyncio.sleep(watchdog.limit_s / PINGS_PER_LIMIT)
