"""An append-only file that survives the death of its process, though not of its machine.

Each append is one write to the operating system, so what was appended before a SIGKILL is there afterwards. It is
not synced to the disk: a simulated fleet need not survive a power cut. A line that was cut short is dropped.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from bus.faults import BrokenInvariant

Row = TypeVar("Row")

MAX_LINE = 4 * 2**20  # bytes; a Spawn with the most allocations a contract allows stays far below


class JournalInUse(Exception):
    """Another process has this journal open: two services of one name would fence nothing."""


class Journal(Generic[Row]):
    """One file of JSON lines of one (union of) row type, owned by one process at a time."""

    def __init__(self, path: Path, row_type: type[Row]) -> None:
        self._path = path
        self._encode = msgspec.json.Encoder().encode
        self._decode: Callable[[bytes], Row] = msgspec.json.Decoder(row_type).decode
        self._file = -1
        self._lock = -1
        self.rows = 0  # in the file, for whoever decides when to rewrite it

    def open(self) -> list[Row]:
        """Take the file (raises JournalInUse), cut off a torn end, and return what it holds."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._path.with_name(self._path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = -1
            raise JournalInUse(f"{self._path} is in use by another process") from None
        rows, good = self._read()
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.ftruncate(self._file, good)
        self.rows = len(rows)
        return rows

    def _read(self) -> tuple[list[Row], int]:
        """The whole lines, and how many bytes they take."""
        rows: list[Row] = []
        good = 0
        if not self._path.exists():
            return rows, good
        with self._path.open("rb") as file:
            while line := file.readline(MAX_LINE):
                if not line.endswith(b"\n"):
                    break
                try:
                    rows.append(self._decode(line))
                except msgspec.DecodeError as error:  # a whole line that makes no sense was not a crash's doing
                    raise BrokenInvariant(f"{self._path} is damaged at byte {good}: {error}") from error
                good += len(line)
        return rows, good

    def append(self, rows: Sequence[Row]) -> None:
        """Write these rows. What is returned from here outlives the process."""
        if self._file < 0 or not rows:
            return
        encode = self._encode
        self._write(self._file, b"\n".join([encode(row) for row in rows]) + b"\n")
        self.rows += len(rows)

    @staticmethod
    def _write(file: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]

    def rewrite(self, rows: Iterable[Row]) -> None:
        """Replace the file by these rows, all or nothing."""
        if self._file < 0:
            return
        kept = list(rows)
        fresh = self._path.with_name(self._path.name + ".new")
        file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        for at in range(0, len(kept), 1000):
            self._write(file, b"".join([self._encode(row) + b"\n" for row in kept[at : at + 1000]]))
        os.replace(fresh, self._path)
        os.close(self._file)
        self._file, self.rows = file, len(kept)

    def close(self) -> None:
        """Give the file back. Closing twice is fine."""
        for name in ("_file", "_lock"):
            if getattr(self, name) >= 0:
                os.close(getattr(self, name))
                setattr(self, name, -1)
