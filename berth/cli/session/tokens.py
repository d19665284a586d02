"""`berth token`: tokens of the HTTP API, which operators make and revoke."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from berth.cli.http import api, calls_api, show_json, show_line, show_result, show_rows
from berth.cli.options import CommandGroup
from berth.cli.session.login import AsJson
from berth.client.types import TokenBody, TokenView
from berth.text import utc
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
    as_json: AsJson = False,
) -> None:
    """Make a token, and print it: nothing shows it again."""
    body = TokenBody(name=name, role=role, project=project, expires_in_s=seconds_of(expires), reason=reason)
    with api(context.obj) as client:
        made = client.create_token(body)
    if as_json:
        show_json(made)
    else:
        show_line(made.token)


@calls_api
def list_tokens(context: typer.Context, as_json: AsJson = False) -> None:
    """List all tokens by name, those that have expired as well."""
    with api(context.obj) as client:
        found = client.list_tokens()

    def row(one: TokenView) -> list[str]:
        made = f"{utc(one.created_at)} by {one.created_by}"
        return [one.name, one.role.value, one.project or "", utc(one.expires_at), made]

    show_rows(found, as_json, ["token", "role", "project", "expires", "created"], row)


@calls_api
def revoke_token(context: typer.Context, name: TokenName, as_json: AsJson = False) -> None:
    """Revoke a token: it is refused within 5 s everywhere."""
    with api(context.obj) as client:
        revoked = client.revoke_token(name)
    show_result(revoked, as_json, f"token {name} is revoked")


token = CommandGroup(no_args_is_help=True, help="Tokens of the HTTP API. Operators make and revoke them.")
token.command("create")(create_token)
token.command("list")(list_tokens)
token.command("revoke")(revoke_token)
