"""What commands print: tables of 80 columns, forms for programs, pages, filters, names by their first letters."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import typer
import yaml
from msgspec import Struct
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from berth.cli import output
from berth.cli.common import Exit, Stop, one_of
from berth.cli.output import (
    Cell,
    Form,
    Id,
    ListedItems,
    ListOutput,
    Table,
    Time,
    age,
    gibibytes,
    mebibytes,
    plain,
    print_data,
    print_list,
    render_table,
    yaml_lines,
)

UUIDS = [f"{digit * 8}-0000-4000-8000-00000000000{digit}" for digit in "123"]
AT = 1_764_561_000.25
SAID = "2025-12-01T03:50:00.250Z"


class Thing(Struct, frozen=True, kw_only=True):
    uuid: str
    name: str
    size: int
    changed_at: float = AT


def row(one: Thing) -> list[Cell]:
    return [Id(one.uuid), one.name, one.size, Text("up", "green"), Time(one.changed_at)]


THINGS = Table("thing name size state | changed", row)
FOUND = [
    Thing(uuid=uuid, name=name, size=size)
    for uuid, name, size in zip(UUIDS, ("host-10", "host-9", "host-1"), (3, 20, 100), strict=True)
]


def listed(
    capsys: pytest.CaptureFixture[str], options: ListOutput, of: ListedItems[Thing] | None = None
) -> tuple[str, str]:
    async def read() -> ListedItems[Thing]:
        return ListedItems(FOUND) if of is None else of

    asyncio.run(print_list(read, THINGS, options))
    printed = capsys.readouterr()
    return printed.out, printed.err


def names(capsys: pytest.CaptureFixture[str], **options: Any) -> list[str]:
    return listed(capsys, ListOutput(form=Form.VALUE, column=["name"], **options))[0].split()


def test_a_table_has_short_identifiers_and_wide_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    lines = listed(capsys, ListOutput())[0].splitlines()
    assert lines[:2] == ["thing     name     size  state", "11111111  host-10  3     up"]
    wide = listed(capsys, ListOutput(form=Form.WIDE))[0].splitlines()
    assert wide[0].split() == ["thing", "name", "size", "state", "changed"]
    assert wide[1].split() == [UUIDS[0], "host-10", "3", "up", SAID]


def test_the_forms_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, ListOutput(form=Form.NAME))[0].splitlines() == UUIDS
    values = listed(capsys, ListOutput(form=Form.VALUE, column=["size", "thing"]))[0].splitlines()
    assert values[0] == f"3\t{UUIDS[0]}"
    more = ListedItems(FOUND, {"--page": "a b"})
    data = json.loads(listed(capsys, ListOutput(form=Form.JSON), more)[0])
    first = {"uuid": UUIDS[0], "name": "host-10", "size": 3, "changed_at": SAID}
    assert (data["items"][0], data["next"], len(data["items"])) == (first, "--page 'a b'", 3)
    text, said = listed(capsys, ListOutput(form=Form.YAML), more)
    assert (yaml.safe_load(text), said) == (data, "")


def test_a_list_says_how_many_of_how_many_and_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(capsys, ListOutput())[1] == ""
    assert listed(capsys, ListOutput(), ListedItems(FOUND, {"--page": "x"}, 1115))[1] == "3 of 1,115, next: --page x\n"
    said = listed(capsys, ListOutput(filter=["name=host-9"]), ListedItems(FOUND, {"--limit": "30"}))[1]
    assert said.splitlines() == ["1 of the 3 that were read", "3, next: --limit 30"]
    assert (
        listed(capsys, ListOutput(form=Form.NAME), ListedItems(FOUND, {"--limit": "30"}))[1] == "3, next: --limit 30\n"
    )


def test_items_are_sorted_by_number_and_filtered(capsys: pytest.CaptureFixture[str]) -> None:
    assert names(capsys, sort="name") == ["host-1", "host-9", "host-10"]
    assert names(capsys, sort="-size") == ["host-1", "host-9", "host-10"]
    assert names(capsys, filter=["name=host-1*"]) == ["host-10", "host-1"]
    assert names(capsys, filter=["name!=host-1*"]) == ["host-9"]
    data = json.loads(listed(capsys, ListOutput(form=Form.JSON, filter=["size=20"], sort="size"))[0])
    assert [one["name"] for one in data["items"]] == ["host-9"]
    for wrong in (ListOutput(sort="colour"), ListOutput(column=["colour"]), ListOutput(filter=["name"])):
        with pytest.raises(typer.BadParameter):
            listed(capsys, wrong)


def test_watching_reads_again_until_it_is_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "WATCH_S", 0.0)
    reads = 0

    async def read() -> ListedItems[Thing]:
        nonlocal reads
        reads += 1
        if reads > 3:
            raise KeyboardInterrupt
        return ListedItems([replace(FOUND[0], size=reads)])

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(print_list(read, THINGS, ListOutput(form=Form.VALUE, column=["size"], watch=True)))
    assert capsys.readouterr().out.split() == ["1", "2", "3"]


@pytest.mark.parametrize("width", [40, 80])
def test_a_table_is_as_wide_as_the_terminal_and_forges_nothing(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    rows = [["a" * 60, "日本" * 30, "short"], ["x\ny", Text("z\x1b[31m" * 20, "red"), "\u202e"]]
    render_table(console, ["one", "two", "three"], rows)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 3 and "\x1b" not in "".join(lines) and "\u2026" in lines[1]
    assert max(Text(line).cell_len for line in lines) <= width


def test_units_and_ages() -> None:
    assert [mebibytes(amount) for amount in (0, 512, 2048, 261_632, 4_194_304)] == ["0", "512M", "2G", "255.5G", "4T"]
    assert [gibibytes(amount) for amount in (0, 20, 4000)] == ["0", "20G", "3.906T"]
    assert [age(seconds) for seconds in (-1, 59, 119, 120, 7199, 7200, 172_799, 172_800)] == (
        ["0s", "59s", "119s", "2m", "119m", "2h", "47h", "2d"]
    )
    assert output.shown(Time(time.time() - 300)) == "5m" and output.shown(Time(0.0)) == ""
    assert output.shown(Time(time.time() + 86_400 * 90 + 60)) == "in 90d"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"at": AT, "since": AT, "first_seen": AT}, {"at": SAID, "since": SAID, "first_seen": SAID}),
        ({"a": [{"tripped_at": AT}]}, {"a": [{"tripped_at": SAID}]}),
        (
            {"released_at": 0.0, "at_once": 4, "rate": 0.5, "flat": AT},
            {"released_at": None, "at_once": 4, "rate": 0.5, "flat": AT},
        ),
    ],
)
def test_a_time_of_the_calendar_is_rfc_3339(data: Mapping[str, Any], said: Mapping[str, Any]) -> None:
    assert plain(data) == said


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": [1, [2, {"c": None}], "yes", "- x", "a: b", "\u2028\n"], "empty": [], "none": {}}, "1": True},
        [],
        {},
        "text",
    ],
)
def test_yaml_is_read_back(tree: Any) -> None:
    text = "\n".join(yaml_lines(tree))
    assert yaml.safe_load(text) == tree
    assert all(c.isprintable() or c == "\n" for c in text)


def test_one_thing_has_its_name_and_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    print_data(FOUND[0], Form.NAME)
    print_data(FOUND[0], Form.VALUE)
    assert capsys.readouterr().out.splitlines() == ["host-10", UUIDS[0], "host-10", "3", SAID]
    print_data([FOUND[0]], Form.JSON)
    assert json.loads(capsys.readouterr().out) == {"items": [plain(msgspec.to_builtins(FOUND[0]))], "next": None}


A, B, C = "abcd1111-0000-4000-8000-000000000000", "abcd2222-0000-4000-8000-000000000000", UUIDS[0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (A, A),
        (A.upper().replace("-", ""), A),
        ("abcd1", A),
        ("web", C),
        ("abcd", "name.ambiguous"),
        ("abc", "name.ambiguous"),
        ("111", "name.ambiguous"),
        ("1111", C),
        ("two", "name.ambiguous"),
        ("nothing", "thing.unknown"),
        (UUIDS[2], "thing.unknown"),
    ],
)
def test_a_thing_is_named_by_its_name_or_four_of_its_letters(text: str, found: str) -> None:
    known = {A: "two", B: "two", C: "web"}
    if "." not in found:
        assert one_of("thing", "thing.unknown", text, known) == found
        return
    with pytest.raises(Stop) as stop:
        one_of("thing", "thing.unknown", text, known)
    assert (stop.value.status, stop.value.code) == (Exit.NO, found)
    if found == "name.ambiguous":
        assert all(one in str(stop.value) for one in known if one.startswith(text) or known[one] == text)
