"""Where the pages of a running `berth up` are, for commands of the same user: a file in its state directory.

Imported by commands that load neither settings nor a worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

API_FILE = "api.json"
MAX_BYTES = 16 * 1024
MAX_SETTINGS_BYTES = 2**20
SETTINGS_FILE = "berth.toml"


class UpAddress(Struct, frozen=True, forbid_unknown_fields=True):
    """An address on this computer, and the token that it wants."""

    url: str
    token: str


def lock_file(state: Path) -> Path:
    """The file that a `berth up` keeps locked for as long as it runs."""
    return state / "up.lock"


def default_state(env: Mapping[str, str]) -> Path:
    """The user's state directory, where the settings name none."""
    # PostgreSQL will not run as root, and whom it runs as then may not enter root's home.
    if os.geteuid() == 0 and "XDG_STATE_HOME" not in env:
        return Path("/var/lib/berth")
    return Path(env.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "berth"


def state_of(config: Path | None, env: Mapping[str, str]) -> Path:
    """The state directory that the settings name, without reading the rest of them."""
    if env.get("BERTH_STATE_DIR"):
        return Path(env["BERTH_STATE_DIR"])
    named = config or Path(env.get("BERTH_CONFIG") or SETTINGS_FILE)
    with contextlib.suppress(OSError, ValueError, RecursionError), named.open("rb") as file:
        found = tomllib.loads(file.read(MAX_SETTINGS_BYTES).decode()).get("state_dir", "")
        if isinstance(found, str) and found:
            return Path(found)
    return default_state(env)


def write_private(path: Path, content: bytes) -> None:
    """Replace a file that only its owner reads, whole or not at all. Raises OSError."""
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # 0600 from its beginning
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_private(path: Path, most: int) -> bytes:
    """A file that is its owner's alone. Raises FileNotFoundError and other OSError; PermissionError too when others may
    read or write it, or it is another user's, ValueError when it is no file or too long.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no file")
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError("it is not its owner's alone (chmod 600)")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most} bytes")
    return content


def leave_address(state: Path, address: UpAddress) -> Callable[[], None]:
    """Leave the address for other commands; returns a function that removes it. Raises OSError."""
    path = state / API_FILE
    write_private(path, msgspec.json.encode(address))
    return lambda: path.unlink(missing_ok=True)


def find_address(state: Path) -> UpAddress | None:
    """The address of the `berth up` that runs with this state directory; None: none runs, or it is another user's.

    One that was killed has left its file, and its port may be another program's by now: the lock tells.
    """
    try:
        if not _is_locked(lock_file(state)):
            return None
        return msgspec.json.decode(read_private(state / API_FILE, MAX_BYTES), type=UpAddress)
    except (OSError, ValueError, msgspec.DecodeError, RecursionError):
        return None


def _is_locked(path: Path) -> bool:
    lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
