"""`berth token`: tokens of the HTTP API, which operators make and revoke."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from berth.cli.http import api, calls_api
from berth.cli.output import As, Cell, Form, ListedItems, ListOutput, Table, Time, print_items, print_result
from berth.client.types import TokenBody, TokenView
from bus.contracts.objects import TokenRole

_DURATION = re.compile(r"([1-9][0-9]{0,8})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MIN_S, MAX_S = 60, 315_360_000

TokenName = Annotated[str, typer.Argument(help="The token's name: what the logs have for its holder.", metavar="NAME")]


def seconds_of(text: str) -> int:
    """A duration such as 90d, 12h, 30m or 60s, in seconds. Raises BadParameter."""
    found = _DURATION.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not MIN_S <= seconds <= MAX_S:
        raise typer.BadParameter(f"{text!r}: a duration from 60s to 3650d, such as 90d, 12h or 30m")
    return seconds


@calls_api
def create_token(
    context: typer.Context,
    name: TokenName,
    role: Annotated[TokenRole, typer.Option("--role", help="What it may do.")],
    project: Annotated[str | None, typer.Option("--project", help="Of role project, the only one it sees.")] = None,
    expires: Annotated[str, typer.Option("--expires", help="From now: 90d, 12h, 30m.")] = "90d",
    reason: Annotated[str, typer.Option("--reason", help="The reason, for the log.")] = "",
    form: As = Form.TABLE,
) -> None:
    """Make a token, and print it: nothing shows it again."""
    body = TokenBody(name=name, role=role, project=project, expires_in_s=seconds_of(expires), reason=reason)
    with api(context.obj) as client:
        made = client.create_token(body)
    print_result(made, form, made.token)


@calls_api
def list_tokens(context: typer.Context, *, listing: ListOutput) -> None:
    """List all tokens by name, those that have expired as well."""
    with api(context.obj) as client:
        found = client.list_tokens()

    print_items(ListedItems(found), TOKENS, listing)


@calls_api
def revoke_token(context: typer.Context, name: TokenName, form: As = Form.TABLE) -> None:
    """Revoke a token: it is refused within 5 s everywhere."""
    with api(context.obj) as client:
        revoked = client.revoke_token(name)
    print_result(revoked, form, f"token {name} is revoked")


def _row(one: TokenView) -> list[Cell]:
    return [one.name, one.role.value, one.project or "", Time(one.expires_at), Time(one.created_at), one.created_by]


TOKENS = Table("token role project expires created by", _row)
