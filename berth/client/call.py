"""One description of each operation of `/api/v1`, from which both clients have a typed method."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from enum import Enum
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload
from urllib.parse import quote

import msgspec
from msgspec import Struct

from bus.contracts.base import Message

API_ROOT = "/api/v1"

P = ParamSpec("P")
A = TypeVar("A")


class ApiCall(Struct, Generic[A], frozen=True):
    """One request: what is asked, and the type of the answer.

    path: below API_ROOT, with the names of `at` in braces. query: parameters; those that are None are left out.
    """

    method: str
    path: str
    answer: Any  # the type A
    at: Mapping[str, str] = {}
    query: Mapping[str, Any] = {}
    body: object = None

    def target(self) -> str:
        """The path with its parameters filled in."""
        return API_ROOT + self.path.format_map({name: quoted(value) for name, value in self.at.items()})

    def parameters(self) -> dict[str, str]:
        """The query as texts."""
        return {name: _text(value) for name, value in self.query.items() if value is not None}

    def content(self) -> bytes | None:
        """The body as JSON. None: there is none."""
        if self.body is None:
            return None
        if not isinstance(self.body, Message):
            return msgspec.json.encode(self.body)
        fields = msgspec.to_builtins(self.body)
        fields.pop("type")  # the tag is the bus's own
        return msgspec.json.encode(fields)


class Feed(ApiCall[A], Generic[A], frozen=True, kw_only=True):
    """A stream of server-sent events. A: what it yields. ends: the states that end it, `answer` the types by event."""

    ends: frozenset[str] = frozenset()
    one_build: bool = False  # events of one build have rising numbers; one that comes again is left out


class SyncCaller(Protocol):
    """A client that waits."""

    def send(self, call: ApiCall[A]) -> A:
        """Carry out one call."""
        ...

    def follow(self, feed: Feed[A]) -> Iterator[A]:
        """Follow a stream."""
        ...


class AsyncCaller(Protocol):
    """A client that awaits."""

    async def send(self, call: ApiCall[A]) -> A:
        """Carry out one call."""
        ...

    def follow(self, feed: Feed[A]) -> AsyncIterator[A]:
        """Follow a stream."""
        ...


def quoted(value: str) -> str:
    """A value as one segment of a path; a path of dots alone would be taken for a step up."""
    return value.replace(".", "%2E") if value in (".", "..") else quote(value, safe="")


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value.value if isinstance(value, Enum) else value)


class operation(Generic[P, A]):  # noqa: N801  (a decorator)
    """A method of both clients: it describes a call, which the client that has it sends."""

    def __init__(self, describe: Callable[Concatenate[Any, P], ApiCall[A]]) -> None:
        self.describe = describe
        functools.update_wrapper(self, describe)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: SyncCaller, owner: type) -> Callable[P, A]: ...
    @overload
    def __get__(self, client: AsyncCaller, owner: type) -> Callable[P, Coroutine[Any, Any, A]]: ...
    @overload
    def __get__(self, client: None, owner: type) -> operation[P, A]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        if client is None:
            return self

        @functools.wraps(self.describe)
        def called(*args: P.args, **named: P.kwargs) -> Any:
            return client.send(self.describe(client, *args, **named))

        return called


class feed(Generic[P, A]):  # noqa: N801  (a decorator)
    """The same of a stream."""

    def __init__(self, describe: Callable[Concatenate[Any, P], Feed[A]]) -> None:
        self.describe = describe
        functools.update_wrapper(self, describe)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: SyncCaller, owner: type) -> Callable[P, Iterator[A]]: ...
    @overload
    def __get__(self, client: AsyncCaller, owner: type) -> Callable[P, AsyncIterator[A]]: ...
    @overload
    def __get__(self, client: None, owner: type) -> feed[P, A]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        if client is None:
            return self

        @functools.wraps(self.describe)
        def called(*args: P.args, **named: P.kwargs) -> Any:
            return client.follow(self.describe(client, *args, **named))

        return called
