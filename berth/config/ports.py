"""The ports of private servers: which are free, and given to nobody else."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections import deque
from pathlib import Path

# Ports of ours are drawn from this many just below those that the system gives out, and none of them below the lowest.
PORTS = 12_000
LOWEST_PORT = 10_000
PORT_TRIES = 100
# The ports given last, this many, are kept from all other tests; their servers need seconds to bind them.
KEPT_PORTS = 256


class ServerFailed(RuntimeError):
    """A private server did not start, or stopped by itself. The text ends with the tail of its log."""


def free_port() -> int:
    """A TCP port on 127.0.0.1 that is free now, that is given only once, and that the system gives to no client.

    Its server binds it seconds later: one of the system's own choice could be a client's by then, and one that is only
    drawn could be drawn again, here or by another system that starts on this computer. Raises ServerFailed.
    """
    lowest = _lowest_allocated()
    for _ in range(PORT_TRIES):
        wanted = lowest - 1 - secrets.randbelow(PORTS) if lowest - PORTS >= LOWEST_PORT else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", wanted))
            port: int = probe.getsockname()[1]
            _reserve(port)
            return port
    raise ServerFailed(f"no free port on 127.0.0.1 in {PORT_TRIES} tries")


# Open for as long as this process lives: the kernel ends it with us, whatever kills us.
_reserved: deque[int] = deque()


def _reserve(port: int) -> None:
    """Keep a port from all who draw ports as we do, by a name of the kernel's. Raises OSError: it is kept already."""
    if sys.platform != "linux":
        return  # there are no such names
    with socket.socket(socket.AF_UNIX) as name:
        name.bind(f"\0berth-port-{port}")
        _reserved.append(name.detach())
    if len(_reserved) > KEPT_PORTS:
        os.close(_reserved.popleft())


def _lowest_allocated() -> int:
    """The lowest port that the system chooses itself, for clients and for who binds port 0; 0 where it is unknown."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 0
