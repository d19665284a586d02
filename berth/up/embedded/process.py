"""A server process of our own that never outlives us, whatever kills us.

The server runs under a small shell that holds the other end of a pipe: when this process ends, even by SIGKILL, the
pipe closes and the shell stops the server. So nothing has to be cleaned up by hand, and no server is ever adopted.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from berth.config.ports import ServerFailed

START_TIMEOUT_S = 180.0  # RabbitMQ takes 70 s where eight other jobs share two cores
RUN_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.02

# stdin is the pipe we hold, stdout carries the server's process id. Job control is off, so the server sees none of it.
# The watcher stops the server when the pipe closes; when no "keep" came before, this process died, and a
# temporary directory goes too. The shell's exit status is the server's.
_GUARD = """
how="$1"; log="$2"; goes="$3"; shift 3
exec 3>&1 4<&0 </dev/null >>"$log" 2>&1
"$@" 3>&- 4<&- &
server=$!
echo "$server" >&3
exec 3>&-
{ read -r word <&4; kill -s "$how" "$server"; [ "$word" = keep ] || exit 9; exit 0; } 2>/dev/null &
watcher=$!
exec 4<&-
wait "$server"; status=$?
kill "$watcher" 2>/dev/null; wait "$watcher" 2>/dev/null
[ $? != 9 ] || [ -z "$goes" ] || rm -rf "$goes"
exit "$status"
"""

# Prints the first of these directories that cannot be entered.
_ENTER = 'for place; do cd "$place" 2>/dev/null || { printf %s "$place"; exit; }; done'


class DirectoryInaccessible(ServerFailed):
    """A server's user may not enter a directory that the server needs. The text names both."""


class ServerMissing(RuntimeError):
    """The server is not installed on this computer."""


class Account:
    """The system user a server runs as: ourselves, or an unprivileged one when we are root."""

    def __init__(self, candidates: Sequence[str] = ()) -> None:
        self.name: str | None = None
        self.uid, self.gid = os.geteuid(), os.getegid()
        if self.uid != 0:
            return
        for name in candidates:
            with contextlib.suppress(KeyError):
                entry = pwd.getpwnam(name)
                self.name, self.uid, self.gid = entry.pw_name, entry.pw_uid, entry.pw_gid
                return

    def own(self, path: Path) -> None:
        """Hand a path to the account."""
        if self.name is not None:
            os.chown(path, self.uid, self.gid)

    def popen_arguments(self) -> dict[str, object]:
        """The arguments that make subprocess start a child as this account."""
        return {} if self.name is None else {"user": self.uid, "group": self.gid, "extra_groups": []}

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a short command as this account, in `/` and a clean environment. Raises ServerFailed: it may not."""
        try:
            done: subprocess.CompletedProcess[str] = subprocess.run(
                command,
                env=clean_environment(),
                cwd="/",
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=RUN_TIMEOUT_S,
                check=False,
                **self.popen_arguments(),  # type: ignore[call-overload]
            )
        except (OSError, subprocess.TimeoutExpired) as fault:
            raise ServerFailed(f"{self.name or 'this user'} cannot run {command[0]}: {fault}") from fault
        return done

    def require_access(self, directory: Path) -> None:
        """Check that the account may enter a directory. Raises DirectoryInaccessible.

        The kernel decides, as the account: mode bits alone do not show access lists and mount options.
        """
        if self.name is None:
            return
        refused = self.run("/bin/sh", "-c", _ENTER, "enter", *reversed((directory, *directory.parents))).stdout
        if refused:
            raise DirectoryInaccessible(
                f"the server runs as the user {self.name}, who may not enter {refused}, and is to keep its files in "
                f"{directory}: choose another directory, or let others enter this one (chmod o+x {refused})"
            )


class GuardedProcess:
    """One server process under its guard. Not restartable: make a new one."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        log: Path,
        account: Account,
        stop_signal: str = "TERM",
        temporary: Path | None = None,
    ) -> None:
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", stop_signal, str(log), str(temporary or ""), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(env),
            cwd=cwd,
            start_new_session=True,  # Ctrl-C is for us: we stop the server when we have drained
            **account.popen_arguments(),  # type: ignore[call-overload]
        )
        assert self._guard.stdin is not None and self._guard.stdout is not None
        self._held = self._guard.stdin
        with self._guard.stdout as output:
            self.pid = int(output.readline() or 0)
        self.log = log
        atexit.register(self.stop)

    @property
    def running(self) -> bool:
        """Whether the server is alive."""
        return self._guard.poll() is None

    @property
    def status(self) -> int | None:
        """How it ended: its exit status, 128 and more for a signal; None while it runs."""
        status: int | None = self._guard.poll()
        return status

    def wait_until(self, name: str, ready: Callable[[], bool], *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when the server is ready. Raises ServerFailed, with its name, when it dies or takes too long."""
        until = time.monotonic() + timeout_s
        while not ready():
            if not self.running:
                raise ServerFailed(f"{name} ended with status {self._guard.returncode}:\n{self.tail()}")
            if time.monotonic() > until:
                self.kill()
                raise ServerFailed(f"{name} was not ready after {timeout_s:.0f} s:\n{self.tail()}")
            time.sleep(POLL_S)

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the server as it likes to be stopped; kill it when it does not. May be called again."""
        atexit.unregister(self.stop)
        self._let_go()
        try:
            self._guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would."""
        atexit.unregister(self.stop)
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._guard.pid, signal.SIGKILL)
        self._guard.wait(STOP_TIMEOUT_S)
        self._let_go()
        until = time.monotonic() + STOP_TIMEOUT_S
        while _alive_in_group(self._guard.pid) and time.monotonic() < until:  # a dying server still holds its port
            time.sleep(POLL_S)

    def abort(self) -> None:
        """End the server with SIGABRT, so that it prints where it is; one that is stopped (SIGSTOP) stays so."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGABRT)

    def tail(self, lines: int = 20) -> str:
        """The end of the server's log."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _let_go(self) -> None:
        if not self._held.closed:
            with contextlib.suppress(BrokenPipeError):
                self._held.write(b"keep\n")
                self._held.close()


class Workspace:
    """Where a private server keeps its files: a given directory, or a temporary one that goes with it."""

    def __init__(self, directory: Path | None, prefix: str) -> None:
        self.temporary = directory is None
        self.path = Path(tempfile.mkdtemp(prefix=prefix)) if directory is None else directory.absolute()
        self.path.mkdir(parents=True, exist_ok=True)

    def remove(self) -> None:
        """Delete it when it was temporary."""
        if self.temporary:
            shutil.rmtree(self.path, ignore_errors=True)


def clean_environment() -> dict[str, str]:
    """The environment of a private server: PGDATA, PGPORT and friends of the caller must not reach it."""
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def listening(port: int) -> bool:
    """Whether something accepts connections on a port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _alive_in_group(group: int) -> bool:
    """Whether a process group has a member that is more than a zombie."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _parent, its_group = entry.read_text().rpartition(")")[2].split()[:3]
            # A leader may be a zombie already while its threads still die, and hold the port.
            if int(its_group) == group and (state not in "ZX" or len(list((entry.parent / "task").iterdir())) > 1):
                return True
    return False
