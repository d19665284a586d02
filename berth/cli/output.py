"""What a command prints: a list, one thing, or what was done, in the form that the caller names.

A table is for a person: 80 columns unless the terminal has more, identifiers by their first letters, ages. The other
forms are for programs, and `wide` is both: nothing is cut there.
"""

from __future__ import annotations

import asyncio
import fnmatch
import itertools
import json
import re
import shlex
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import typer
from msgspec import Struct
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from berth.text import printable, render_rows

WATCH_S = 2.0
SHORT_ID = 8
LEAST_WIDTH = 8  # of a column that is cut
GAP = 2

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

T = TypeVar("T")


class Form(StrEnum):
    """The form of what a command prints."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"
    VALUE = "value"

    @property
    def is_data(self) -> bool:
        """For a program, and not for a person."""
        return self not in (Form.TABLE, Form.WIDE)


class Id(str):
    """An identifier: by its first letters in a table, whole elsewhere."""

    __slots__ = ()


class Time(float):
    """Seconds since the epoch: an age in a table ("5m", of a time to come "in 5m"), RFC 3339 elsewhere."""

    __slots__ = ()


Cell = str | Text | int | float


class Table(Struct, Generic[T], frozen=True):
    """How items are listed. columns: their names, those after the bar only in `wide`; the first one names the item.
    row: the cells of an item, in the order of all columns.
    """

    columns: str
    row: Callable[[T], Sequence[Cell]]

    @property
    def all(self) -> list[str]:
        """The names of all columns."""
        return self.columns.replace("|", " ").split()

    @property
    def shown(self) -> list[str]:
        """The names of the columns of a table."""
        return self.columns.partition("|")[0].split()


class ListedItems(Struct, Generic[T], frozen=True):
    """Items that were read. next: the options that list what follows, if more is there; total: how many there are, if
    that is known.
    """

    items: Sequence[T]
    next: Mapping[str, str] | None = None
    total: int | None = None


As = Annotated[Form, typer.Option("--output", "-o", help="The form of what is printed.")]


class ListOutput(Struct, frozen=True, kw_only=True):
    """The options of each list."""

    form: As = Form.TABLE
    column: Annotated[
        list[str] | None,
        typer.Option("--column", "-c", metavar="COLUMN", help="Only this column, of all of `wide`; repeatable."),
    ] = None
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="COLUMN", help="By this column; -COLUMN: the greatest first.")
    ] = None
    filter: Annotated[
        list[str] | None,
        typer.Option(
            "--filter", metavar="COLUMN=PATTERN", help="Of those read, only these (!=: the others); repeatable."
        ),
    ] = None
    watch: Annotated[bool, typer.Option("--watch", help=f"List again every {WATCH_S:g} s, until Ctrl-C.")] = False


# The command that is run, as it was called.
called: ContextVar[typer.Context] = ContextVar("called")


async def print_list(
    read: Callable[[], Awaitable[ListedItems[T]]],
    table: Table[T],
    options: ListOutput,
    as_data: Callable[[T], object] = lambda item: item,
) -> None:
    """Read items and print them; with --watch again and again. as_data: an item as JSON and YAML have it.

    Raises BadParameter for a column that there is not.
    """
    _check_columns(table, options)
    while True:
        listed = await read()
        if options.watch and out.is_terminal:
            out.clear()
        print_items(listed, table, options, as_data)
        if not options.watch:
            return
        await asyncio.sleep(WATCH_S)


def print_items(
    listed: ListedItems[T],
    table: Table[T],
    options: ListOutput,
    as_data: Callable[[T], object] = lambda item: item,
) -> None:
    """Print items that were read, once. Raises as `print_list`."""
    rows = [(item, dict(zip(table.all, table.row(item), strict=True))) for item in listed.items]
    for text in options.filter or ():
        matches = _condition(table, text)
        rows = [row for row in rows if matches(row[1])]
    if options.sort:
        (name,) = _columns(table, [options.sort.removeprefix("-")])
        rows.sort(key=lambda row: _sort_key(row[1][name]), reverse=options.sort.startswith("-"))
    if options.form in (Form.JSON, Form.YAML):
        print_data({"items": [as_data(item) for item, _ in rows], "next": options_of(listed.next)}, options.form)
        return
    by_default = table.shown if options.form in (Form.TABLE, Form.NAME) else table.all
    _print_rows([row for _, row in rows], _columns(table, options.column or ()) or by_default, options.form)
    _print_end(listed, len(rows))


def _check_columns(table: Table[Any], options: ListOutput) -> None:
    """Before anything is read. Raises BadParameter."""
    _columns(table, [*(options.column or ()), *([options.sort.removeprefix("-")] if options.sort else [])])
    for text in options.filter or ():
        _condition(table, text)


def _print_rows(rows: Sequence[Mapping[str, Cell]], picked: Sequence[str], form: Form) -> None:
    match form:
        case Form.TABLE:
            render_table(out, picked, [[shown(row[name]) for name in picked] for row in rows])
        case Form.WIDE:
            render_rows(out, picked, [[whole(row[name]) for name in picked] for row in rows])
        case _:
            names = picked[:1] if form is Form.NAME else picked
            _write("\t".join(printable(_text(whole(row[name]))) for name in names) + "\n" for row in rows)


def print_one(table: Table[T], item: T) -> None:
    """Print one item for a person: a line for each column that has something."""
    cells = [(name, whole(cell)) for name, cell in zip(table.all, table.row(item), strict=True)]
    for name, cell in cells:
        if text := printable(_text(cell)):
            out.print(Text.assemble((f"{name:12} ", "bold"), Text(text, getattr(cell, "style", ""))), soft_wrap=True)


def _print_end(listing: ListedItems[Any], printed: int) -> None:
    """How many of how many, and how to go on; nothing where all was printed."""
    count, total = len(listing.items), listing.total
    if printed != count:
        err.print(f"{printed:,} of the {count:,} that were read", soft_wrap=True)
    if listing.next is None and (total is None or total == count):
        return
    of = f" of {total:,}" if total is not None else ""
    then = f", next: {command_with(listing.next)}" if listing.next is not None else ""
    err.print(Text(printable(f"{count:,}{of}{then}")), soft_wrap=True)


def print_data(data: object, form: Form) -> None:
    """Print data as JSON or YAML, or by name or values, times by RFC 3339 and control characters escaped. Several items
    are a list that has ended.
    """
    tree = plain(data)
    if isinstance(tree, list) and form not in (Form.NAME, Form.VALUE):
        tree = {"items": tree, "next": None}
    match form:
        case Form.YAML:
            _write(f"{line}\n" for line in yaml_lines(tree))
        case Form.NAME | Form.VALUE:
            _write(f"{line}\n" for line in _values(tree, only_name=form is Form.NAME))
        case _:
            text = msgspec.json.format(msgspec.json.encode(tree), indent=2).decode()
            _write([_escaped(text), "\n"])


def print_document(document: object) -> None:
    """Print a document of a form of its own as JSON, as it is."""
    _write([_escaped(msgspec.json.format(msgspec.json.encode(document), indent=2).decode()), "\n"])


def print_data_line(data: object, form: Form) -> None:
    """Print data at once: for a stream of them. A line of JSON, or a document of YAML."""
    if form is Form.YAML:
        _write(["---\n", *(f"{line}\n" for line in yaml_lines(plain(data)))])
    else:
        _write([_escaped(msgspec.json.encode(plain(data)).decode()), "\n"])


def print_result(data: object, form: Form, line: str) -> None:
    """Print a result as data, or as one line."""
    if form.is_data:
        print_data(data, form)
    else:
        print_line(line)


def print_line(text: str) -> None:
    """Print one line for a person, whatever a name in it contains."""
    out.print(Text(printable(text)), soft_wrap=True)


def _write(parts: Iterable[str]) -> None:
    sys.stdout.writelines(parts)
    sys.stdout.flush()


def _escaped(text: str) -> str:
    """JSON without what controls a terminal; only strings can have that."""
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


# --- data


_TIMES = re.compile(r"(.*_)?(at|before|since)|first_seen|last_seen|searched_to")
_NAMES = ("name", "instance_uuid", "request_id", "host", "id", "uuid", "queue", "cell", "service", "project")


def plain(data: object) -> Any:
    """Builtin values, and each time of the calendar by RFC 3339."""
    return _dated(msgspec.to_builtins(data))


def _dated(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: rfc3339(one) if isinstance(one, float) and _TIMES.fullmatch(str(key)) else _dated(one)
            for key, one in value.items()
        }
    return [_dated(one) for one in value] if isinstance(value, list | tuple) else value


def rfc3339(at: float) -> str | None:
    """A time of the calendar; None for the time 0, which stands for none."""
    if not at:
        return None
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def yaml_lines(value: Any, indent: str = "") -> Iterable[str]:
    """A tree of builtin values as YAML, its strings quoted as JSON quotes them."""
    if isinstance(value, Mapping) and value:
        for key, one in value.items():
            yield from _yaml_entry(f"{indent}{_escaped(json.dumps(str(key)))}:", one, f"{indent}  ")
    elif isinstance(value, list | tuple) and value:
        for one in value:
            yield from _yaml_entry(f"{indent}-", one, f"{indent}  ")
    else:
        yield f"{indent}{_scalar(value)}"


def _yaml_entry(head: str, value: Any, indent: str) -> Iterable[str]:
    if isinstance(value, Mapping | list | tuple) and value:
        yield head
        yield from yaml_lines(value, indent)
    else:
        yield f"{head} {_scalar(value)}"


def _scalar(value: Any) -> str:
    return _escaped(msgspec.json.encode(value).decode())


def _values(tree: Any, *, only_name: bool) -> Iterable[str]:
    """Of each item its name, or the values of its fields, a line each."""
    for one in tree if isinstance(tree, list) else [tree]:
        if not isinstance(one, Mapping):
            yield _scalar(one).strip('"')
        elif only_name:
            yield next((printable(str(one[key])) for key in _NAMES if one.get(key)), "")
        else:
            yield from (printable(value if isinstance(value, str) else _scalar(value)) for value in one.values())


# --- tables


def shown(cell: Cell) -> str | Text:
    """A cell of a table."""
    if isinstance(cell, Id):
        return cell[:SHORT_ID]
    if isinstance(cell, Time):
        past_s = time.time() - cell
        return "" if not cell else age(past_s) if past_s > -1 else f"in {age(-past_s)}"
    return whole(cell)


def whole(cell: Cell) -> str | Text:
    """A cell where nothing is cut."""
    if isinstance(cell, Time):
        return rfc3339(cell) or ""
    return cell if isinstance(cell, Text) else f"{cell:g}" if isinstance(cell, float) else str(cell)


def age(seconds: float) -> str:
    """A span as one number and its unit: "45s", "12m", "5h", "3d"."""
    for limit, size, unit in ((120, 1, "s"), (7_200, 60, "m"), (172_800, 3_600, "h")):
        if seconds < limit:
            return f"{max(0, int(seconds / size))}{unit}"
    return f"{int(seconds / 86_400)}d"


def mebibytes(size_mb: float) -> str:
    """Memory: "0", "512M", "255.5G"."""
    return f"{size_mb:g}M" if 0 < size_mb < 1024 else gibibytes(size_mb / 1024)


def gibibytes(size_gb: float) -> str:
    """A disk: "0", "400G", "3.9T"."""
    return "0" if not size_gb else f"{size_gb:.4g}G" if size_gb < 1024 else f"{size_gb / 1024:.4g}T"


def render_table(console: Console, headers: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Aligned columns within the width of the console: the widest are cut."""
    table = [[cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row] for row in rows]
    widths = [
        max(cell_len(text) for text in (header, *(row[at].plain for row in table))) for at, header in enumerate(headers)
    ]
    while sum(widths) + GAP * (len(widths) - 1) > console.width and max(widths) > LEAST_WIDTH:
        widths[widths.index(max(widths))] -= 1
    render_rows(
        console, headers, [[_cut(cell, width) for cell, width in zip(row, widths, strict=True)] for row in table]
    )


def _cut(cell: Text, width: int) -> Text:
    text = printable(cell.plain)
    if cell_len(text) <= width:
        return Text(text, cell.style)
    return Text(set_cell_size(text, width - 1).rstrip() + "\u2026", cell.style)


def _text(cell: str | Text) -> str:
    return cell.plain if isinstance(cell, Text) else cell


def _columns(table: Table[Any], named: Sequence[str]) -> list[str]:
    """Raises BadParameter for a column that there is not."""
    for name in named:
        if name not in table.all:
            raise typer.BadParameter(f"there is no column {name!r}; there are {', '.join(table.all)}")
    return list(named)


def _condition(table: Table[Any], text: str) -> Callable[[Mapping[str, Cell]], bool]:
    """A filter. Raises BadParameter."""
    name, equals, pattern = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r}: COLUMN=PATTERN, or COLUMN!=PATTERN", param_hint="--filter")
    wanted = not name.endswith("!")
    (column,) = _columns(table, [name.removesuffix("!")])
    return lambda row: fnmatch.fnmatchcase(_text(whole(row[column])), pattern) is wanted


def _sort_key(cell: Cell) -> tuple[int, float, list[tuple[int, int, str]]]:
    """Numbers by size before texts, and those by the numbers within: `host-9` before `host-10`."""
    if isinstance(cell, int | float):
        return 0, float(cell), []
    parts = re.split(r"(\d+)", _text(whole(cell)))
    return 1, 0.0, [(0, int(part[:18]), part) if part.isdecimal() else (1, 0, part) for part in parts]


# --- the command that goes on


def options_of(more: Mapping[str, str] | None) -> str | None:
    """Options as they are typed."""
    return None if more is None else " ".join(f"{name} {shlex.quote(value)}" for name, value in more.items())


def command_with(more: Mapping[str, str]) -> str:
    """The command that is run, with other values of these options."""
    context = called.get(None)
    if context is None:
        return f"{options_of(more)}"
    words = [context.command_path]
    for one in context.command.params:
        source = context.get_parameter_source(one.name or "")
        if source is not None and source.name == "COMMANDLINE" and one.opts[0] not in more:
            words += _typed(one, context.params.get(one.name or ""))
    return " ".join([*words, f"{options_of(more)}"])


def _typed(parameter: Any, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [parameter.opts[0] if value else (parameter.secondary_opts or parameter.opts)[0]]
    values = value if isinstance(value, list | tuple) else [value]
    texts = [
        one.strftime("%Y-%m-%dT%H:%M:%S") if isinstance(one, datetime) else str(getattr(one, "value", one))
        for one in values
    ]
    option = [parameter.opts[0]] if parameter.param_type_name == "option" else []
    return list(itertools.chain.from_iterable([*option, shlex.quote(text)] for text in texts))
