"""An append-only file that survives the death of its process, and after `sync` that of its machine."""

# Each append is one write to the operating system, so appended rows are there after a SIGKILL. What a power cut must
# not take is synced to the disk; the machines of a simulated fleet end with it. A line that was cut short is dropped.
# A line is a row as JSON, a tab and the checksum of that JSON, so that a damaged byte is noticed wherever it is. A
# damaged file is kept aside whole, logged, and written anew from all lines that can be read. A line without a checksum
# was written by hand.

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import structlog
from msgspec import Struct

from bus.faults import Forbidden
from compute_agent import metrics

Row = TypeVar("Row")

MAX_LINE = 4 * 2**20  # bytes; a Spawn with the most allocations a contract allows stays far below
MAX_KEPT = 16  # damaged files of one journal that are kept; a disk that damages more is to be looked at
MAX_NAMED = 16  # uuids found in damaged bytes that the log names
CHECK_LENGTH = 8  # hexadecimal digits of CRC-32
DAMAGED = "journal.damaged"
NOT_WRITTEN = "journal.not_written"

_UUID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")

log = structlog.get_logger(__name__)


class JournalInUse(Forbidden):
    """Another process has this journal open. Two services of one name would end no attempt."""

    code = "journal.in_use"


class JournalUnusable(Forbidden):
    """A journal that cannot be mended without its operator; starting again does not help."""

    code = DAMAGED


class Damage(Struct, frozen=True):
    """Lines that cannot be read."""

    offset: int  # where the first begins
    lines: int
    length: int  # in bytes
    uuids: tuple[str, ...]  # uuids that can be seen in them
    kept: str = ""


class Journal(Generic[Row]):
    """One file of JSON lines of one (union of) row type, owned by one process at a time. synced: whether it is to
    survive a power cut. damage: what `open` found; None when all could be read.
    """

    def __init__(self, path: Path, row_type: type[Row], *, synced: bool = True) -> None:
        self._path = path
        self._is_synced = synced
        self._encode = msgspec.json.Encoder().encode
        self._decode: Callable[[bytes], Row] = msgspec.json.Decoder(row_type).decode
        self._file = -1
        self._lock = -1
        self._syncing = asyncio.Lock()
        self._appended = 0  # rows, since the start
        self._on_disk = 0  # of these
        self._lost = ""  # why rows may be missing in the file: a later write or sync that succeeds does not bring them
        self.rows = 0  # in the file: its owner rewrites it by this number
        self.damage: Damage | None = None

    def open(self) -> list[Row]:
        """Take the file, cut off a torn end, and return what can be read of it. Raises JournalInUse, and
        JournalUnusable: it is damaged and cannot be kept aside.
        """
        with self._writing():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._path.with_name(self._path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                self._lock = -1
                raise JournalInUse(f"{self._path} is in use by another process") from None
            rows, good, self.damage = self._read()
            if self.damage is not None:
                self.damage = self._back_up(self.damage)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            if self.damage is not None:
                self.rewrite(rows)
                return rows
            os.ftruncate(self._file, good)
            if self._is_synced:
                os.fsync(self._file)  # of a process that died before its sync
            self._sync_directory()
        self.rows = len(rows)
        return rows

    def _read(self) -> tuple[list[Row], int, Damage | None]:
        """The rows, how many bytes the whole lines take, and what cannot be read."""
        rows: list[Row] = []
        bad: list[tuple[int, int]] = []
        uuids: dict[str, None] = {}
        good = 0
        if not self._path.exists():
            return rows, good, None
        with self._path.open("rb") as file:
            for line, length in _lines(file.readline):
                too_long = length > len(line)
                row = None if too_long else self._row(line[:-1])
                if row is not None:
                    rows.append(row)
                elif not line.endswith(b"\n") and not too_long:
                    log.warning("journal.torn_end", file=str(self._path), offset=good, length=length)
                    break
                if row is None or not line.endswith(b"\n"):  # a row, and no line's end: that byte alone is damaged
                    bad.append((good, length))
                    uuids.update((found.decode(), None) for found in _UUID.findall(line))
                good += length
        if not bad:
            return rows, good, None
        named = tuple(list(uuids)[:MAX_NAMED])
        return rows, good, Damage(bad[0][0], len(bad), sum(length for _, length in bad), named)

    def _row(self, line: bytes) -> Row | None:
        """The row of a line. None: it is damaged."""
        body, tab, check = line.rpartition(b"\t")
        if tab and (len(check) != CHECK_LENGTH or check != _check(body)):
            return None
        try:
            return self._decode(body if tab else line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def _back_up(self, damage: Damage) -> Damage:
        """Copy the damaged file, before anything is written, and log it."""
        names = (self._path.with_name(f"{self._path.name}.damaged-{number}") for number in range(1, MAX_KEPT + 1))
        kept = next((name for name in names if not name.exists()), None)
        problem = f"{self._path} is damaged at byte {damage.offset} ({damage.lines} lines, {damage.length} bytes)"
        if kept is None:
            raise JournalUnusable(
                f"{problem}, and {MAX_KEPT} damaged ones are kept beside it: look after the disk, then move those away"
            )
        fresh = kept.with_name(kept.name + ".new")
        try:
            shutil.copyfile(self._path, fresh)
            fresh.chmod(0o600)
            if self._is_synced:
                _sync_and_close(os.open(fresh, os.O_RDONLY))
            fresh.replace(kept)
            self._sync_directory()
        except OSError as error:
            raise JournalUnusable(f"{problem}, and it cannot be copied to {kept}: {error.strerror or error}") from error
        metrics.JOURNALS_DAMAGED.labels(self._path.name).inc()
        log.error(
            DAMAGED,
            file=str(self._path),
            offset=damage.offset,
            lines=damage.lines,
            length=damage.length,
            uuids=damage.uuids,
            kept=str(kept),
        )
        return msgspec.structs.replace(damage, kept=str(kept))

    def append(self, rows: Sequence[Row]) -> None:
        """Write these rows. A row that is returned from here outlives the process. Raises JournalUnusable: nothing was
        written.
        """
        # What its owner has in memory is ahead of the file then, so the process ends, and the next start goes by the
        # file.
        if self._file < 0 or not rows:
            return
        with self._writing():
            end = os.fstat(self._file).st_size
            try:
                self._write(self._file, self._written(rows))
            except OSError:
                os.ftruncate(self._file, end)  # the line behind one that was cut short could not be read
                raise
        self.rows += len(rows)
        self._appended += len(rows)

    async def sync(self) -> None:
        """Return when the rows that were appended so far outlive the machine. Raises JournalUnusable, also if an
        earlier call has failed, as the caller of that one may have gone on.
        """
        # A disk takes milliseconds, so one sync is for all that have come meanwhile, in a thread.
        wanted = self._appended
        async with self._syncing:
            if self._lost:
                raise JournalUnusable(self._lost, code=NOT_WRITTEN)
            if not self._is_synced or self._file < 0 or self._on_disk >= wanted:
                return
            appended = self._appended
            with self._writing():
                await asyncio.to_thread(_sync_and_close, os.dup(self._file))
            self._on_disk = max(self._on_disk, appended)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A fault of the disk is one that names the file, whichever call it leaves. Raises JournalUnusable."""
        try:
            yield
        except OSError as error:
            self._lost = f"{self._path} cannot be written: {error.strerror or error}"
            raise JournalUnusable(self._lost, code=NOT_WRITTEN) from error

    def _sync_directory(self) -> None:
        """A file that is new, or has a new name, is in its directory after a power cut only then."""
        if self._is_synced:
            _sync_and_close(os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY))

    def _written(self, rows: Iterable[Row]) -> bytes:
        encode = self._encode
        return b"".join([b"%b\t%b\n" % (body, _check(body)) for body in map(encode, rows)])

    @staticmethod
    def _write(file: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]

    def rewrite(self, rows: Iterable[Row]) -> None:
        """Replace the file by these rows, all or nothing. Raises JournalUnusable: nothing."""
        if self._file < 0:
            return
        kept = list(rows)
        fresh = self._path.with_name(self._path.name + ".new")
        with self._writing():
            try:
                file = self._made(fresh, kept)
                os.replace(fresh, self._path)
            except OSError:
                with contextlib.suppress(OSError):
                    fresh.unlink(missing_ok=True)  # it may take the space that is missing
                raise
            os.close(self._file)
            self._file, self.rows, self._on_disk = file, len(kept), self._appended
            self._sync_directory()

    def _made(self, fresh: Path, rows: Sequence[Row]) -> int:
        """A file of these rows, whole on the disk before it takes the place of another."""
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            for at in range(0, len(rows), 1000):
                self._write(file, self._written(rows[at : at + 1000]))
            if self._is_synced:
                os.fsync(file)
        except OSError:
            os.close(file)
            raise
        return file

    def close(self) -> None:
        """Give the file back. Closing twice is fine."""
        for name in ("_file", "_lock"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)


def _sync_and_close(file: int) -> None:
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _check(body: bytes) -> bytes:
    return b"%08x" % zlib.crc32(body)


def _lines(readline: Callable[[int], bytes]) -> Iterator[tuple[bytes, int]]:
    """Each line with its end, and its length; of one that is too long only the beginning."""
    while line := readline(MAX_LINE):
        length = last = len(line)
        more = line
        while last == MAX_LINE and not more.endswith(b"\n"):
            more = readline(MAX_LINE)
            last = len(more)
            length += last
        yield line, length
