"""`berth login`, `berth logout` and `berth context`: where the HTTP API is, and as whom to call it."""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from msgspec.structs import replace

from berth.cli.http import calls_api
from berth.cli.output import (
    As,
    Cell,
    Form,
    ListedItems,
    ListOutput,
    Table,
    print_data,
    print_items,
    print_line,
    print_result,
)
from berth.cli.session.contexts import (
    MAX_TOKEN,
    Context,
    contexts_file,
    delete_context,
    found_context,
    read_contexts,
    set_context,
    use_context,
)
from berth.cli.session.contexts import named as context_named
from berth.client import ApiAddressInvalid
from berth.client.http import checked_url
from berth.client.oidc import DeviceCode, LoginFault, token_by_device
from berth.text import printable

ContextArgument = Annotated[str, typer.Argument(help="The context.", metavar="NAME")]


@calls_api
def login(
    url: Annotated[str, typer.Argument(help="The address of berth: https://HOST, or http://127.0.0.1:PORT.")],
    name: Annotated[str, typer.Option("--name", help="The context's name; else the host and port.")] = "",
    ca_file: Annotated[str, typer.Option("--ca-file", help="The certificates to trust, in PEM.")] = "",
    insecure: Annotated[bool, typer.Option("--insecure", help="Plain http to another computer, too.")] = False,
    oidc: Annotated[
        bool | None,
        typer.Option("--oidc/--token", help="With the OpenID provider of this berth, or a token; else as it offers."),
    ] = None,
    form: As = Form.TABLE,
) -> None:
    """Log in at an address, and use it from now on.

    On a terminal, where this berth has an OpenID provider, you confirm a code in any browser. Else the token is
    prompted for, or the first line of standard input. It is kept, with the address, in ~/.config/berth/contexts.json,
    which only you can read.
    """
    url = checked_url(url, insecure=insecure)  # before a token is typed for it
    ca_file = os.path.abspath(ca_file) if ca_file else ""
    base = Context(url, ca_file=ca_file, insecure=insecure)
    context = replace(base, token=_token_for(base, oidc))
    with context.client() as client:
        caller = client.show_caller()
    parts = urlsplit(url)
    name = name or (f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)).replace("[", "")
    set_context(contexts_file(os.environ), name, context)
    whose = f"{caller.name}, role {caller.role.value}" + (f" of project {caller.project}" if caller.project else "")
    line = f"logged in at {url} as {whose}; context {name} is in use{but_first(os.environ)}"
    print_result({"context": name, "url": url, "caller": caller}, form, line)


def _token_for(context: Context, oidc: bool | None) -> str:
    """A token of the OpenID provider, or one that is shown. oidc: None: as berth offers, if a person is there."""
    if oidc is False or (oidc is None and not sys.stdin.isatty()):
        return shown_token()
    with context.client() as client:
        offer = client.show_login().oidc
    if offer is not None:
        return checked_token(token_by_device(offer, _show_code, ca_file=context.ca_file))
    if oidc:
        raise LoginFault("this berth has no OpenID provider: log in with a token", code="oidc.not_offered")
    return shown_token()


def _show_code(device: DeviceCode) -> None:
    """Where to confirm which code, on standard error: standard output has the result alone."""
    address, code = printable(device.verification_uri), printable(device.user_code)
    typer.echo(f"open {address} in a browser and confirm the code {code}", err=True)
    if device.verification_uri_complete:
        typer.echo(f"or open {printable(device.verification_uri_complete)}, and compare the code", err=True)


def but_first(env: Mapping[str, str]) -> str:
    """The remark that a variable goes before the context in use; "": none does."""
    return "; BERTH_URL is set, and goes before it" if env.get("BERTH_URL") else ""


def shown_token() -> str:
    """The token, from a prompt or standard input; never from the command line, which others can read."""
    shown = getpass.getpass("Token: ") if sys.stdin.isatty() else sys.stdin.readline(MAX_TOKEN + 2)
    return checked_token(shown.strip())


def checked_token(token: str) -> str:
    """The token, if it can be one. Raises ApiAddressInvalid."""
    if not token or len(token) > MAX_TOKEN:
        raise ApiAddressInvalid("a token is one line, and not empty", code="api.token")
    return token


@calls_api
def logout(
    name: Annotated[str, typer.Argument(help="The context; else the one in use.", metavar="[NAME]")] = "",
    form: As = Form.TABLE,
) -> None:
    """Delete a context with its token.

    The token stays valid: `berth token revoke` ends it.
    """
    deleted = delete_context(contexts_file(os.environ), name)
    print_result({"context": deleted}, form, f"context {deleted} is deleted")


@calls_api
def list_contexts(*, listing: ListOutput) -> None:
    """List all contexts; the one in use is marked."""
    known = read_contexts(contexts_file(os.environ))
    rows = [
        {"name": name, "url": one.url, "in_use": name == known.current} for name, one in sorted(known.contexts.items())
    ]

    print_items(ListedItems(rows), CONTEXTS, listing)


@calls_api
def use(name: ContextArgument, form: As = Form.TABLE) -> None:
    """Use another context from now on."""
    use_context(contexts_file(os.environ), name)
    print_result({"context": name}, form, f"context {name} is in use{but_first(os.environ)}")


@calls_api
def show_context(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The context; else the one in use.", metavar="[NAME]")] = "",
    form: As = Form.TABLE,
) -> None:
    """Show a context, without its token: by default what commands use now, and where that is from."""
    config: Path | None = context.obj
    if name:
        source, found = f"context {name}", context_named(read_contexts(contexts_file(os.environ)), name)
    else:
        in_use = found_context(os.environ, config)
        source, found = in_use.source, in_use.context
    shown = {"source": source, "has_token": bool(found.token)}
    shown |= {field: getattr(replace(found, token=""), field) for field in ("url", "ca_file", "insecure")}
    if form.is_data:
        print_data(shown, form)
        return
    for key, value in shown.items():
        print_line(f"{key:<10} {value}")


def _row(one: dict[str, Any]) -> list[Cell]:
    return [one["name"], one["url"], "yes" if one["in_use"] else ""]


CONTEXTS = Table("context url in_use", _row)
