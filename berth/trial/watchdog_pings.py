"""Receives the watchdog pings of worker processes, as systemd does for its services.

`bus.service.watchdog` sends them.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections.abc import Mapping

from bus.service.watchdog import PING

# A worker whose event loop stands still for so long is ended. An honest worker's loop never does for more than seconds.
STALL_S = 60.0
MAX_DATAGRAMS = 1000  # read at one look
MAX_BYTES = 4096
CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: put there by the kernel


class WatchdogPings:
    """A socket at which workers report that their event loops run.

    limit_s: so long a loop may stand still.
    """

    def __init__(self, *, limit_s: float = STALL_S) -> None:
        self.limit_s = limit_s
        self._name = f"berth-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.setblocking(False)
        self._socket.bind(f"\0{self._name}")  # an abstract address: no file that would stay
        self._last: dict[int, float] = {}
        self._looked: float | None = None

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment that a worker needs."""
        return {"NOTIFY_SOCKET": f"@{self._name}", "WATCHDOG_USEC": str(int(self.limit_s * 1e6))}

    def receive(self, now: float) -> None:
        """Note who has sent a ping. now: seconds of a monotonic clock."""
        if self._looked is not None and now - self._looked > self.limit_s / 2:
            self._last = {}  # this process stood still itself, and its socket holds few pings: everyone begins anew
        self._looked = now
        for _ in range(MAX_DATAGRAMS):
            try:
                body, ancillary, _flags, _address = self._socket.recvmsg(MAX_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
            except BlockingIOError:
                return
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and PING in body.splitlines():
                    self._last[CREDENTIALS.unpack(data)[0]] = now

    def stalled_s(self, pid: int, now: float) -> float:
        """How long ago the last ping of a process is; of one never received, since it was first asked for."""
        return now - self._last.setdefault(pid, now)

    def remove(self, pid: int) -> None:
        """A process has ended."""
        self._last.pop(pid, None)

    def close(self) -> None:
        """Take no more pings."""
        self._socket.close()
