"""The command line without a system: what it prints of itself, what its ends mean, how a person reads it."""

from __future__ import annotations

import io
import json
import re
import uuid
from contextlib import redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Annotated

import pytest
import typer
from msgspec import Struct
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from berth.cli.common import Exit, Stop, explain
from berth.cli.instance.instances import BootOptions, RequestOutcome, requests_of, show_requests
from berth.cli.main import app
from berth.cli.options import CommandGroup
from berth.cli.output import Form, print_data
from berth.text import printable, render_rows, render_scores, render_stages
from bus.contracts.build import FunnelStep, HostScore
from bus.contracts.deploy import NetworkRequest
from bus.contracts.stages import StageTimes
from bus.faults import DatabaseUnavailable
from lab.demo.run import render_failures
from lab.load import Failure
from lab.load.command import DEFAULT_MIX, _status
from lab.load.command import app as load
from lab.load.record import LoadRecord, LoadSettings, Totals
from lab.reference.commands import leaves

# --- the command line without a system: what it prints of itself, and what its ends mean


def printed(*arguments: str, program: typer.Typer = app) -> str:
    done = CliRunner().invoke(program, arguments, env={"COLUMNS": "80", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    return done.output


def test_the_version_is_the_packages() -> None:
    number = re.escape(metadata.version("berth-scheduler"))
    assert re.match(rf"berth {number} \(([0-9a-f]{{8}}, )?Python 3\.", printed("--version"))


# They run until they are stopped, or what they print is a document of a form of its own.
NO_JSON = {
    "run", "serve web", "serve fencer", "placement serve", "nova serve",
    "bus asyncapi", "placement export", "placement openapi",
}  # fmt: skip


def test_every_command_with_a_result_takes_json() -> None:
    takes = {path for path, command in leaves() if any("--output" in one.opts for one in command.params)}
    assert {path.removeprefix("berth ") for path, _ in leaves() if path not in takes} == NO_JSON


def test_help_cuts_nothing_off_in_80_columns() -> None:
    text = printed("--help", program=load)
    assert "\u2026" not in text
    assert DEFAULT_MIX in re.sub(r"\s+", "", text)
    assert "`small=8,large=2,metal=1`" in re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("group", [(), ("dead-letter",), ("placement",), ("quarantine",), ("breaker",)])
def test_what_a_command_is_for_is_printed_whole(group: tuple[str, ...]) -> None:
    commands = printed(*group, "--help").partition("--help")[2]
    assert commands
    assert [line for line in commands.splitlines() if line.rstrip().endswith("...")] == []


def test_an_unavailable_database_has_the_status_of_what_is_out_of_reach() -> None:
    stop = explain(DatabaseUnavailable("connection refused"))
    assert stop is not None
    assert (stop.status, stop.code) == (Exit.UNAVAILABLE, "database.unavailable")


def test_json_holds_nothing_that_controls_a_terminal() -> None:
    hostile = "a\u202eb\u009bc\x7f\n\u2066"
    with redirect_stdout(io.StringIO()) as out:
        print_data({"name": hostile}, Form.JSON)
    assert json.loads(out.getvalue()) == {"name": hostile}
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [({"active": 1, "failed": 9}, 0), ({"refused": 10}, Exit.NO), ({"failed": 10}, Exit.NO), ({}, 0)],
)
def test_a_load_of_which_nothing_became_active_is_no_success(outcomes: dict[str, int], status: int) -> None:
    boots = sum(outcomes.values())
    ended = LoadRecord(settings=LoadSettings(mode="burst", boots=boots), totals=Totals(boots=boots, outcomes=outcomes))
    try:
        assert _status(ended) == status
    except Stop as stop:
        assert (stop.status, stop.code) == (status, "load.none_active")


@pytest.mark.parametrize(("boots", "deletes"), [({"active": 9, "unsent": 1}, {}), ({"active": 9}, {"unsent": 1})])
def test_a_load_that_the_broker_did_not_take_whole_is_no_success(
    boots: dict[str, int], deletes: dict[str, int]
) -> None:
    totals = Totals(boots=sum(boots.values()), outcomes=boots, delete_outcomes=deletes)
    with pytest.raises(Stop) as stop:
        _status(LoadRecord(settings=LoadSettings(mode="burst", boots=totals.boots), totals=totals))
    assert (stop.value.status, stop.value.code) == (Exit.UNAVAILABLE, "bus.unavailable")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("berth ce", "cell"),
        ("berth cell ", "delete"),
        ("berth cell create c1 --dis", "--disabled"),
        ("berth list --ho", "--host"),
    ],
)
def test_a_shell_completes_commands_options_and_values(words: str, offered: str) -> None:
    """As bash requests it; the script that does so is printed by `berth --show-completion`."""
    env = {"_BERTH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    done = CliRunner().invoke(app, [], env=env, prog_name="berth")
    assert offered in done.output.split(), done.output


@pytest.mark.parametrize(
    "arguments", [["serve", "fencer"], ["host", "fence", "h1", "--reason", "dead", "--switch-off", "--yes"]]
)
def test_nothing_is_switched_off_without_a_plug_in(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "berth.toml").write_text("")
    done = CliRunner().invoke(app, ["--config", str(tmp_path / "berth.toml"), *arguments])
    assert (done.exit_code, done.stdout) == (Exit.USAGE, "")
    assert "no plug-in is named" in done.stderr


# --- options of a command as a struct


class ShipOptions(Struct, frozen=True, kw_only=True):
    port: Annotated[str, typer.Option(help="Where to.")]
    crates: Annotated[int, typer.Option(min=1, max=9, help="How many.")] = 2
    seal: Annotated[list[str] | None, typer.Option(help="Repeatable.")] = None


options_app = CommandGroup()


@options_app.command()
def ship(context: typer.Context, name: Annotated[str, typer.Argument()], *, options: ShipOptions) -> None:
    """Send it."""
    typer.echo(f"{context.command.name} {name} {options}")


@pytest.mark.parametrize(
    ("arguments", "ends"),
    [
        (["a", "--port", "x"], "ship a ShipOptions(port='x', crates=2, seal=None)"),
        (["a", "--port", "x", "--crates", "9", "--seal", "p", "--seal", "q"], "crates=9, seal=['p', 'q'])"),
    ],
)
def test_the_fields_of_a_struct_are_the_options_of_a_command(arguments: list[str], ends: str) -> None:
    ran = CliRunner().invoke(options_app, arguments)
    assert ran.exit_code == 0 and ran.stdout.strip().endswith(ends)


@pytest.mark.parametrize("arguments", [["a"], ["a", "--port", "x", "--crates", "10"]])
def test_a_field_without_a_default_is_demanded_and_bounds_hold(arguments: list[str]) -> None:
    assert CliRunner().invoke(options_app, arguments).exit_code == 2


def test_one_request_a_machine_or_one_for_all_that_start_together() -> None:
    apart = requests_of(BootOptions(flavor="m1", count=3, name="n"))
    assert [one.name for one in apart] == ["n-1", "n-2", "n-3"] and len({one.instance_uuid for one in apart}) == 3
    assert {one.count for one in apart} == {1}
    (gang,) = requests_of(BootOptions(flavor="m1", count=3, name="n", min_count=2))
    assert (gang.name, gang.count, gang.min_count) == ("n", 3, 2)
    (single,) = requests_of(BootOptions(flavor="m1", name="n", group="rack"))
    assert (single.name, single.group, single.server_group) == ("n", "rack", None)
    port, network = (f"{letter * 8}-0000-4000-8000-000000000000" for letter in "ab")
    options = BootOptions(flavor="m1", availability_zone="zürich", port=[port], network=[network])
    (placed,) = requests_of(options)
    assert placed.availability_zone == "zürich"
    assert placed.networks == (NetworkRequest(port=port), NetworkRequest(network=network))


# --- the output for a person: nothing cut off, nothing that controls the terminal behind their back


def shown(render, width: int = 20) -> str:  # type: ignore[no-untyped-def]
    console = Console(file=io.StringIO(), width=width, highlight=False)
    render(console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_columns_line_up_and_are_never_cut() -> None:
    name = str(uuid.uuid4())
    rows = [[name, Text("active", "green")], ["x", "[b]no markup[/b]"], ["日本", "wide"]]
    lines = shown(lambda console: render_rows(console, ["instance", "state"], rows)).splitlines()
    assert len(lines) == 4
    assert lines[1] == f"{name}  active"
    assert lines[2] == f"{'x':36}  [b]no markup[/b]"
    assert lines[3] == f"日本{' ' * 32}  wide"


def test_control_characters_stay_out_of_the_terminal() -> None:
    assert printable("a\x1b[31mb\u202e\r\nc") == r"a\x1b[31mb\u202e\r\nc"


def test_a_name_forges_no_row_of_a_listing() -> None:
    forged = "x\n3f2504e0-4f89-41d3-9a0c-0305e82c3301  web-1  m1.small  active"
    lines = shown(lambda console: render_rows(console, ["instance", "state"], [[forged, Text(f"a{forged}")]]))
    assert len(lines.splitlines()) == 2
    funnel = (FunnelStep(step="F\nG", remaining=0, rejected={"a\nb": 1}),)
    failure = Failure(
        instance_uuid="i", flavor="f\nf", state="failed", code="c", reason="r\nr", attempts=1, funnel=funnel
    )
    assert len(shown(lambda console: render_failures([failure], console), width=200).splitlines()) == 2


def test_the_scores_of_a_choice_are_listed_by_weigher() -> None:
    scores = (HostScore(host="h1", weights={"ram": 1.0, "cpu": 0.5}), HostScore(host="h\n2", weights={"ram": 0.25}))
    lines = shown(lambda console: render_scores([scores], console), width=80).splitlines()
    assert [line.split() for line in lines] == [
        ["chosen,", "then", "alternates", "score", "ram", "cpu"],
        ["h1", "1.500", "1.000", "0.500"],
        ["h\\n2", "0.250", "0.250", "0.000"],
    ]


def test_stages_are_listed_with_their_milliseconds_and_what_never_happened_is_not() -> None:
    stage_times = StageTimes(requested=10.0, queued=10.0015, decided=10.002, announced=10.5)
    text = shown(lambda console: render_stages([stage_times], console))
    assert text == "stages: queued 1.5 ms, decided 0.5 ms, announced 498.0 ms\n"


def test_an_explanation_of_several_builds_comes_once() -> None:
    """A gang's refusal had the same sentence on the line of each member."""

    def failed(number: int) -> RequestOutcome:
        return RequestOutcome(
            instance_uuid=str(uuid.UUID(int=number)),
            state="failed",
            code="no_valid_host",
            reason="None of 7 hosts can take it",
            funnel=(FunnelStep(step="providers", remaining=0, rejected={"none": 7}),),
        )

    lines = shown(lambda console: show_requests([failed(1), failed(2)], console), width=200).splitlines()
    assert [line for line in lines if "None of 7" in line] == ["2 x None of 7 hosts can take it"]
    assert sum("no_valid_host, explained below" in line for line in lines) == 2


@pytest.mark.parametrize("state", ["refused", "failed"])
def test_a_build_that_ended_without_a_funnel_shows_its_code(state: str) -> None:
    """Only JSON had the code of a refused build, and the page of codes is searched by it."""
    outcome = RequestOutcome(
        str(uuid.UUID(int=1)), state=state, code="flavor.unknown", reason="there is no flavor nope"
    )
    assert "there is no flavor nope (flavor.unknown)" in shown(
        lambda console: show_requests([outcome], console), width=200
    )
