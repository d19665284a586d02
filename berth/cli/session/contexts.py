"""Contexts: addresses of the HTTP API with their tokens, in a file of the user's; and which of them a command uses."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta as Bound
from msgspec import Struct
from msgspec.structs import replace

from berth.client import AsyncClient, Client
from berth.config.at_up import find_address, read_private, state_of, write_private
from bus.contracts.base import matching, reason_of
from bus.faults import Fault

FILE_NAME = "contexts.json"
NO_CONTEXT = "context.none"
MAX_BYTES = 1024 * 1024
MAX_CONTEXTS = 1_000
MAX_TOKEN = 16 * 1024  # a token of Keystone may have 8 KiB

ContextName = Annotated[str, matching(r"^[A-Za-z0-9_.:\-]{1,64}$(?!\n)", "1 to 64 letters, digits, _, -, . and :")]


class ContextFault(Fault):
    """The file of contexts cannot be used, or has not what a command needs."""

    code = "context.invalid"


class Context(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where the API is, and as whom to call it."""

    url: Annotated[str, Bound(max_length=2_000)]
    token: Annotated[str, Bound(max_length=MAX_TOKEN)] = ""
    ca_file: Annotated[str, Bound(max_length=4_000)] = ""
    insecure: bool = False  # plain http beyond this computer

    def client(self) -> Client:
        """A client of it. Raises ApiAddressInvalid."""
        return Client(self.url, self.token, ca_file=self.ca_file, insecure=self.insecure)

    def async_client(self) -> AsyncClient:
        """The same that awaits."""
        return AsyncClient(self.url, self.token, ca_file=self.ca_file, insecure=self.insecure)


class Contexts(Struct, frozen=True, forbid_unknown_fields=True):
    """All contexts by name. current: the one in use; "": none."""

    current: str = ""
    contexts: Annotated[dict[ContextName, Context], Bound(max_length=MAX_CONTEXTS)] = {}


class FoundContext(Struct, frozen=True):
    """The context that a command uses. source: where it is from, for a person."""

    source: str
    context: Context


def contexts_file(env: Mapping[str, str]) -> Path:
    """Where the user's contexts are."""
    return Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "berth" / FILE_NAME


def read_contexts(path: Path) -> Contexts:
    """All of them; none where there is no file. Raises ContextFault."""
    try:
        return msgspec.json.decode(read_private(path, MAX_BYTES), type=Contexts)
    except FileNotFoundError:
        return Contexts()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise ContextFault(f"{path} is no file of contexts: {reason_of(fault)}") from None
    except (OSError, ValueError) as fault:
        reason = getattr(fault, "strerror", None) or str(fault)
        raise ContextFault(f"{path} cannot be used: {reason}", code="context.unusable") from None


def set_context(path: Path, name: str, context: Context) -> None:
    """Add or replace a context, and use it from now on. Raises ContextFault."""
    try:
        msgspec.convert(name, ContextName)
    except msgspec.ValidationError as fault:
        raise ContextFault(f"context {name[:64]!r}: {reason_of(fault)}") from None
    with _changing(path):
        known = read_contexts(path)
        if name not in known.contexts and len(known.contexts) >= MAX_CONTEXTS:
            raise ContextFault(f"there are {MAX_CONTEXTS} contexts already")
        _write(path, Contexts(name, {**known.contexts, name: context}))


def use_context(path: Path, name: str) -> None:
    """Use another context from now on. Raises ContextFault."""
    with _changing(path):
        known = read_contexts(path)
        named(known, name)
        _write(path, replace(known, current=name))


def delete_context(path: Path, name: str) -> str:
    """Delete a context and its token; "": the one in use. Returns its name. Raises ContextFault."""
    with _changing(path):
        known = read_contexts(path)
        name = name or known.current
        if not name:
            raise ContextFault("no context is in use: name one", code="context.unknown")
        named(known, name)
        left = {one: context for one, context in known.contexts.items() if one != name}
        _write(path, Contexts("" if known.current == name else known.current, left))
    return name


def named(known: Contexts, name: str) -> Context:
    """One of them. Raises ContextFault."""
    if name not in known.contexts:
        there = ", ".join(sorted(known.contexts)) or "none; `berth login URL` makes one"
        raise ContextFault(f"there is no context {name[:64]!r}; there are {there}", code="context.unknown")
    return known.contexts[name]


def found_context(env: Mapping[str, str], config: Path | None = None) -> FoundContext:
    """The context of a command: BERTH_URL with BERTH_TOKEN, else the one in use, else the `berth up` of this user.

    A token is for the address that it was given with: one from the file is never shown to BERTH_URL. Raises
    ContextFault when there is none.
    """
    if env.get("BERTH_URL"):
        ca_file = env.get("BERTH_CA_FILE", "")
        return FoundContext("BERTH_URL", Context(env["BERTH_URL"], env.get("BERTH_TOKEN", ""), ca_file=ca_file))
    known = read_contexts(contexts_file(env))
    if known.current:
        context = named(known, known.current)
        return FoundContext(f"context {known.current}", replace(context, token=env.get("BERTH_TOKEN") or context.token))
    at_up = find_address(state_of(config, env))
    if at_up is None:
        raise ContextFault("no address of berth: `berth login URL`, BERTH_URL, or a `berth up`", code=NO_CONTEXT)
    return FoundContext("berth up", Context(at_up.url, at_up.token))


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[None]:
    """One change at a time: two logins at once both stay. Raises ContextFault."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as fault:
        raise ContextFault(f"{path.parent}: {fault.strerror or fault}", code="context.unusable") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _write(path: Path, contexts: Contexts) -> None:
    try:
        write_private(path, msgspec.json.format(msgspec.json.encode(contexts), indent=2) + b"\n")
    except OSError as fault:
        raise ContextFault(f"{path}: {fault.strerror or fault}", code="context.unusable") from None
