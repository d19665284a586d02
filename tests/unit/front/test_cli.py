"""The command line without a system: what it prints of itself, and what its ends mean."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from berth.cli import app
from berth.commands.common import Exit, Stop, explain, print_json
from berth.commands.load import DEFAULT_MIX, _status
from berth.load.record import LoadRecord, LoadSettings, Totals
from berth.reference.commands import leaves
from bus.faults import DatabaseUnavailable


def printed(*arguments: str) -> str:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "80", "TERM": "dumb"})
    assert done.exit_code == 0, done.output
    return done.output


def test_the_version_is_the_packages() -> None:
    number = re.escape(metadata.version("berth"))
    assert re.match(rf"berth {number} \(([0-9a-f]{{8}}, )?Python 3\.", printed("--version"))


# They run until they are stopped, or what they print is a document of a form of its own.
NO_JSON = {
    "run", "web", "fencer", "placement serve",
    "man", "asyncapi", "trace-settings", "placement export", "placement openapi",
}  # fmt: skip


def test_every_command_with_a_result_takes_json() -> None:
    takes = {path for path, command in leaves() if any("--json" in one.opts for one in command.params)}
    assert {path.removeprefix("berth ") for path, _ in leaves() if path not in takes} == NO_JSON


def test_help_cuts_nothing_off_in_80_columns() -> None:
    text = printed("load", "--help")
    assert "\u2026" not in text
    assert DEFAULT_MIX in re.sub(r"\s+", "", text)
    assert "`small=8,large=2,metal=1`" in re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("group", [(), ("dead-letters",), ("placement",), ("quarantine",), ("breaker",)])
def test_what_a_command_is_for_is_printed_whole(group: tuple[str, ...]) -> None:
    commands = printed(*group, "--help").partition("Commands:")[2]
    assert commands
    assert [line for line in commands.splitlines() if line.rstrip().endswith("...")] == []


def test_an_unavailable_database_has_the_status_of_what_is_out_of_reach() -> None:
    stop = explain(DatabaseUnavailable("connection refused"))
    assert stop is not None
    assert (stop.status, stop.code) == (Exit.UNAVAILABLE, "database.unavailable")


def test_json_holds_nothing_that_controls_a_terminal() -> None:
    hostile = "a\u202eb\u009bc\x7f\n\u2066"
    with redirect_stdout(io.StringIO()) as out:
        print_json({"name": hostile})
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


def test_the_manual_page_lists_every_command_and_roff_takes_it() -> None:
    page = printed("man")
    for path, _ in leaves():
        assert f'"{path.replace("-", chr(92) + "-")} "' in page or f'"{path.replace("-", chr(92) + "-")}"' in page, path
    assert "\\-\\-dry\\-run" in page and page.startswith(".TH BERTH 1")
    assert not [line for line in page.splitlines() if line.startswith("'")], "a line that roff would take for a request"
    if (groff := shutil.which("groff")) is not None:
        command = [groff, "-man", "-Tascii", "-ww", "-rCHECKSTYLE=0"]
        done = subprocess.run(command, input=page, capture_output=True, text=True, check=False, timeout=60.0)
        assert (done.returncode, done.stderr) == (0, "")
        shown = re.sub(r"\x1b\[[0-9;]*m|.\x08", "", done.stdout)
        assert "berth cells set" in shown and "out of reach" in shown


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("berth ce", "cells"),
        ("berth cells ", "delete"),
        ("berth cells set c1 dis", "disabled"),
        ("berth list --ho", "--host"),
    ],
)
def test_a_shell_completes_commands_options_and_values(words: str, offered: str) -> None:
    """As bash requests it; the script that does so is printed by `berth --show-completion`."""
    env = {"_BERTH_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    done = CliRunner().invoke(app, [], env=env, prog_name="berth")
    assert offered in done.output.split(), done.output


@pytest.mark.parametrize("arguments", [["fencer"], ["hosts", "fence", "h1", "--reason", "dead", "--switch-off"]])
def test_nothing_is_switched_off_without_a_plug_in(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "berth.toml").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "berth", "--config", tmp_path / "berth.toml", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60.0,
    )
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    assert "no plug-in is named" in done.stderr
