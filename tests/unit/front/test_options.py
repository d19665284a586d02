"""Options of a command as a struct."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer
from msgspec import Struct
from typer.testing import CliRunner

from berth.commands.instances import BootOptions, requests_of
from berth.commands.options import CommandGroup


class ShipOptions(Struct, frozen=True, kw_only=True):
    port: Annotated[str, typer.Option(help="Where to.")]
    crates: Annotated[int, typer.Option(min=1, max=9, help="How many.")] = 2
    seal: Annotated[list[str] | None, typer.Option(help="Repeatable.")] = None


app = CommandGroup()


@app.command()
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
    ran = CliRunner().invoke(app, arguments)
    assert ran.exit_code == 0 and ran.stdout.strip().endswith(ends)


@pytest.mark.parametrize("arguments", [["a"], ["a", "--port", "x", "--crates", "10"]])
def test_a_field_without_a_default_is_demanded_and_bounds_hold(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_one_request_a_machine_or_one_for_all_that_start_together() -> None:
    apart = requests_of(BootOptions(flavor="m1", count=3, name="n"))
    assert [one.name for one in apart] == ["n-1", "n-2", "n-3"] and len({one.instance_uuid for one in apart}) == 3
    assert {one.count for one in apart} == {1}
    (gang,) = requests_of(BootOptions(flavor="m1", count=3, name="n", min_count=2))
    assert (gang.name, gang.count, gang.min_count) == ("n", 3, 2)
    (single,) = requests_of(BootOptions(flavor="m1", name="n", group="rack"))
    assert (single.name, single.group, single.server_group) == ("n", "rack", None)
