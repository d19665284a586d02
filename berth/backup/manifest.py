"""A backup's manifest: its content, from when, made by which version, and the checksum of every file.

The manifest is `manifest.json`; `manifest.sha256` is its own checksum, in the form of `sha256sum --check`. Everything
in a backup is input from outside until it has been checked here.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from bus.contracts.base import matching, reason_of
from bus.faults import Fault

FORMAT = 1  # a reader refuses a higher one
MANIFEST = "manifest.json"
MANIFEST_SUM = "manifest.sha256"
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
MAX_SCHEMAS = 10_000
MAX_TABLES = 200  # of one schema
MAX_COLUMNS = 200  # of one table
READ_BYTES = 1024 * 1024

Name = Annotated[str, matching(r"^[A-Za-z_][A-Za-z0-9_\-]{0,62}$", "a name of 1 to 63 letters, digits, _ and -")]
Sha256 = Annotated[str, matching(r"^[0-9a-f]{64}$", "64 hexadecimal digits in lower case")]
Count = Annotated[int, Meta(ge=0)]


class BadBackup(Fault):
    """A directory is no backup that can be restored; the code has the reason."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, code=code)


class TableCopy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table: the rows as PostgreSQL's COPY writes them as text, compressed by gzip.

    bytes, sha256: of the file. text_bytes: its decompressed content. columns: in the order of the text.
    """

    table: Name
    columns: Annotated[list[Name], Meta(min_length=0, max_length=MAX_COLUMNS)]
    rows: Count
    bytes: Count
    text_bytes: Count
    sha256: Sha256


class SequenceValue(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a sequence stands. is_called: its next value is the one after `value`."""

    sequence: Name
    value: int
    is_called: bool


class SchemaCopy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One schema. revision: of its migrations. database_id: its identity, "" when it has none.

    tables: in an order in which a table comes after those that it refers to.
    """

    schema: Name
    revision: Annotated[str, Meta(max_length=64)]
    database_id: Annotated[str, Meta(max_length=64)]
    tables: Annotated[list[TableCopy], Meta(max_length=MAX_TABLES)]
    sequences: Annotated[list[SequenceValue], Meta(max_length=MAX_TABLES)]


class Manifest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a backup. at: the moment of its snapshot, UTC, ISO 8601. berth, server: the
    versions that made it.
    """

    format: Annotated[int, Meta(ge=1)]
    at: Annotated[str, Meta(max_length=64)]
    berth: Annotated[str, Meta(max_length=64)]
    server: Annotated[str, Meta(max_length=200)]
    schemas: Annotated[list[SchemaCopy], Meta(max_length=MAX_SCHEMAS)]

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(table.rows for schema in self.schemas for table in schema.tables)


class _Head(Struct):
    format: int


def file_of(schema: str, table: str) -> str:
    """The name of a table's file in the backup."""
    return f"{schema}.{table}.copy.gz"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest and its checksum, the checksum last: without it a directory is no backup."""
    encoded = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    (directory / MANIFEST).write_bytes(encoded)
    (directory / MANIFEST_SUM).write_text(f"{hashlib.sha256(encoded).hexdigest()}  {MANIFEST}\n")


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a backup whose files are all there and sound. Raises BadBackup."""
    encoded = _read_small(directory / MANIFEST)
    summed = _read_small(directory / MANIFEST_SUM).decode(errors="replace").split()
    if summed != [hashlib.sha256(encoded).hexdigest(), MANIFEST]:
        raise BadBackup(f"{directory / MANIFEST} does not match its checksum", code="backup.damaged")
    manifest = _decode(encoded, directory)
    seen: set[str] = set()
    for schema in manifest.schemas:
        for table in schema.tables:
            name = file_of(schema.schema, table.table)
            if name in seen:
                raise BadBackup(f"the manifest names {name} twice", code="backup.invalid")
            seen.add(name)
            _check_file(directory / name, table)
    return manifest


def _decode(encoded: bytes, directory: Path) -> Manifest:
    try:
        if (found := msgspec.json.decode(encoded, type=_Head).format) > FORMAT:
            raise BadBackup(
                f"{directory} has format {found} and this berth reads up to {FORMAT}: use a newer berth",
                code="backup.newer_format",
            )
        return msgspec.json.decode(encoded, type=Manifest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadBackup(f"{directory / MANIFEST} is no manifest: {reason_of(error)}", code="backup.invalid") from None


def _check_file(path: Path, table: TableCopy) -> None:
    if path.is_symlink() or not path.is_file():
        raise BadBackup(f"{path.name} is missing", code="backup.damaged")
    if path.stat().st_size != table.bytes or _sum(path) != table.sha256:
        raise BadBackup(f"{path.name} differs from the manifest: it was cut off or altered", code="backup.damaged")


def _sum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _read_small(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            found = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        why = error.strerror or str(error)
        raise BadBackup(f"{path.parent} is no backup: {path.name}: {why}", code="backup.missing") from None
    if len(found) > MAX_MANIFEST_BYTES:
        raise BadBackup(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes", code="backup.invalid")
    return found
