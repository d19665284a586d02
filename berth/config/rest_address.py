"""Where Placement's REST API is served when only `--http`, or nothing, sets it, and who may call it there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from berth.config.ports import free_port
from berth.config.settings import Settings
from placement_worker.rest.auth import noauth2_may_listen
from placement_worker.rest.config import RestConfig, with_oslo_conf

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 8778
TOKEN_FILE = "placement.token"
DIGESTS_FILE = "placement-tokens.toml"
TOKEN_BYTES = 32
_TOKEN_LENGTH = len(secrets.token_urlsafe(TOKEN_BYTES))


def with_rest_at(settings: Settings, listen: str) -> Settings:
    """The settings with the REST API served there."""
    return _with_rest(settings, replace(settings.placement.rest, listen=listen))


# --- `berth run placement --http`


class AtHttp(Struct, frozen=True, kw_only=True):
    """The settings of the API that `--http` of a placement worker serves. message: for the operator; empty when there
    is none.
    """

    settings: Settings
    with_rest: bool
    message: str = ""


def at_http(settings: Settings, host: str, port: int) -> AtHttp:
    """The REST API joins health and metrics, unless it has an address of its own or would accept every caller there."""
    here = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if settings.placement.rest.listen not in {"", here}:
        return AtHttp(settings=settings, with_rest=False)
    rest = with_oslo_conf(settings.placement.rest)
    if rest.auth in {None, "noauth2"} and not noauth2_may_listen(rest, host):
        why = f"only health and metrics at http://{here}, no Placement REST API: noauth2 accepts all callers there"
        how = "set [placement.rest] auth to tokens or keystone, or noauth2_anywhere if that is really meant"
        return AtHttp(settings=settings, with_rest=False, message=f"{why}; {how}")
    text = f"Placement's REST API, health and metrics at http://{here}; {_in_force(rest)}"
    return AtHttp(settings=with_rest_at(settings, here), with_rest=True, message=text)


def _in_force(rest: RestConfig) -> str:
    match rest.auth:
        case "tokens":
            return f"auth: the tokens of {rest.token_file}"
        case "keystone":
            return f"auth: Keystone at {rest.keystone.auth_url}"
        case _:
            return "auth: noauth2, callers are not authenticated ([placement.rest] auth may be tokens or keystone, too)"


# --- `berth up`


class AtUp(Struct, frozen=True, kw_only=True):
    """Where `berth up` serves the API. token: the file with the one it takes. taken: the usual address, if it is."""

    settings: Settings
    token: Path | None = None
    taken: str = ""


@contextlib.contextmanager
def for_up(settings: Settings, port: int = DEFAULT_PORT) -> Iterator[AtUp]:
    """As in the settings; where they name no address on loopback, and when they name no auth behind an own token."""
    rest = settings.placement.rest
    if rest.listen or not settings.up.rest:
        yield AtUp(settings=settings)
        return
    with _port(port) as got:
        token = None
        if with_oslo_conf(rest).auth is None:
            token = _token(settings.state.absolute())
            rest = replace(rest, auth="tokens", token_file=str(token.with_name(DIGESTS_FILE)))
        served = _with_rest(settings, replace(rest, listen=f"{LOOPBACK}:{got}"))
        yield AtUp(settings=served, token=token, taken="" if got == port else f"{LOOPBACK}:{port}")


@contextlib.contextmanager
def _port(wanted: int) -> Iterator[int]:
    """The wanted port when it is free, else another one.

    The worker binds it seconds later: until then, and while it is restarted, a name of the kernel's keeps other
    `berth up` from taking the same. That name is gone when this process is.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0berth-up-port-{wanted}")
            socket.create_server((LOOPBACK, wanted)).close()
        except OSError:
            got = free_port()
        else:
            got = wanted
        yield got


def _token(state: Path) -> Path:
    """The file that holds the token, the same at every start; beside it what the API knows of it: a digest."""
    path = state / TOKEN_FILE
    token = _kept(path)
    if token is None:
        token = secrets.token_urlsafe(TOKEN_BYTES)
        _write(path, f"{token}\n")
    digest = hashlib.sha256(token.encode()).hexdigest()
    row = f'[[tokens]]\nsha256 = "{digest}"\nuser_id = "admin"\nproject_id = "admin"\nroles = ["admin", "service"]\n'
    _write(state / DIGESTS_FILE, row)
    return path


def _kept(path: Path) -> str | None:
    """The token of an earlier start, unless others could have read or written it."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            there = os.fstat(file.fileno())
            token = file.read(_TOKEN_LENGTH + 1).strip()
    except (OSError, UnicodeDecodeError):
        return None
    ours = there.st_uid == os.geteuid() and not there.st_mode & 0o077
    return token if ours and len(token) == _TOKEN_LENGTH else None


def _write(path: Path, text: str) -> None:
    """Anew, so that it is ours alone from its first byte on; whole, or not there."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    new.rename(path)


def _with_rest(settings: Settings, rest: RestConfig) -> Settings:
    return replace(settings, placement=replace(settings.placement, rest=rest))
