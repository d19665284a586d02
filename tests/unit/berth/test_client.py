"""The client of `/api/v1`: its operations are those of the served document, and it bears what a server may send."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import httpx
import msgspec
import pytest

from berth.client.call import API_ROOT, ApiCall, Feed, feed, operation, quoted
from berth.client.object_operations import ObjectChangeOptions
from berth.client.operations import WITHOUT_MACHINE, Operations
from berth.client.types import ProblemBody
from berth.config.settings import Settings
from berth.web.application import application
from berth.web.openapi import _inlined
from berth.web.sign_in_sessions import Access
from bus.clock import SystemClock
from bus.contracts.build import ENDED_WITHOUT_MACHINE

METHODS = {
    name: one
    for name in dir(Operations)
    if isinstance(one := inspect.getattr_static(Operations, name), operation | feed)
}
REF = "#/components/schemas/{name}"


def hints(one: operation[Any, Any] | feed[Any, Any]) -> dict[str, Any]:
    return {name: kind for name, kind in get_type_hints(one.describe, include_extras=True).items() if name != "return"}


def without_none(kind: Any) -> Any:
    """The type of a parameter that may be left out; of a body the struct, where a mapping will do as well."""
    if get_origin(kind) in (Union, UnionType):
        left = [one for one in get_args(kind) if one is not type(None) and get_origin(one) is not Mapping]
        return left[0]
    return kind


def described(one: operation[Any, Any] | feed[Any, Any]) -> ApiCall[Any]:
    """The call, with every parameter given."""
    given: dict[str, Any] = {}
    for name, kind in hints(one).items():
        given[name] = (
            ObjectChangeOptions(reason="r", if_version=1, force=True, dry_run=True)
            if kind is ObjectChangeOptions
            else name
        )
    return cast("ApiCall[Any]", one.describe(None, **given))


def schema_of(kind: Any) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components([kind], ref_template=REF)
    return schema


@pytest.fixture(scope="module")
def served() -> dict[str, Any]:
    """The document as the server serves it; no handler is called, so it has nothing behind it."""
    env = SimpleNamespace(clock=SystemClock(), rng=None, cells=(), tracer=None)
    nothing: Any = SimpleNamespace()
    access = Access(None, env.clock)
    app = application(
        cast(Any, env), Settings(), bus=nothing, live=nothing, calls=nothing, drains=nothing, access=access,
        queues=nothing, stored=None, fleet=nothing, metal=nothing, status=nothing, history=nothing, hosts=None,
    )  # fmt: skip

    async def get() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return (await client.get(f"{API_ROOT}/openapi.json")).json()

    return cast("dict[str, Any]", asyncio.run(get()))


def operations(document: dict[str, Any]) -> dict[str, tuple[str, str, dict[str, Any]]]:
    return {
        one["operationId"]: (method.upper(), re.sub(r":path", "", path), one)
        for path, methods in document["paths"].items()
        for method, one in methods.items()
    }


def test_there_is_a_method_for_every_operation_and_no_other(served: dict[str, Any]) -> None:
    assert operations(served).keys() == METHODS.keys()


@pytest.mark.parametrize("name", sorted(METHODS))
def test_an_operation_is_as_the_served_document_has_it(name: str, served: dict[str, Any]) -> None:
    """Method, path, parameters with their types, body and answer."""
    method, path, one = operations(served)[name]
    call, known = described(METHODS[name]), hints(METHODS[name])
    assert (call.method, call.path) == (method, path)
    parameters: dict[str, dict[str, Any]] = {"path": {}, "query": {}}
    for parameter in one.get("parameters", ()):
        parameters[parameter["in"]][parameter["name"]] = parameter["schema"]
    assert call.at.keys() == parameters["path"].keys()
    assert call.query.keys() == parameters["query"].keys()
    options = get_type_hints(ObjectChangeOptions, include_extras=True)
    for place in parameters.values():
        for parameter, schema in place.items():
            assert _inlined(without_none({**options, **known}[parameter])) == schema, parameter
    described_body = one.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    body = without_none(known["body"]) if "body" in known else None
    if get_origin(body) is Mapping:
        assert described_body == {"type": "object"}
    else:
        assert (None if body is None else schema_of(body)) == described_body
    (answer,) = [known for status, known in one["responses"].items() if status.startswith("2")]
    media = "text/event-stream" if isinstance(call, Feed) else "application/json"
    assert answer["content"][media]["schema"] == schema_of(call.answer)


def test_every_field_is_as_the_served_document_has_it(served: dict[str, Any]) -> None:
    calls = [described(one) for one in METHODS.values()]
    bodies = [without_none(kind) for one in METHODS.values() for name, kind in hints(one).items() if name == "body"]
    kinds = [call.answer for call in calls] + [one for one in bodies if get_origin(one) is not Mapping] + [ProblemBody]
    _, components = msgspec.json.schema_components(kinds, ref_template=REF)
    known = {name: sorted(one.get("properties", ())) for name, one in components.items()}
    messages = {"BuildRequest", "ActionRequest"}  # without the tag, which is the bus's own
    for name in messages:
        known[name].remove("type")
    assert known == {name: sorted(one.get("properties", ())) for name, one in served["components"]["schemas"].items()}


def test_the_client_is_imported_without_what_only_a_server_needs() -> None:
    heavy = "sqlalchemy asyncpg aio_pika aiormq numpy authlib starlette uvicorn uvloop structlog jinja2 typer"
    found = subprocess.run(
        [sys.executable, "-c", "import sys, berth.client; print(*{one.partition('.')[0] for one in sys.modules})"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert "httpx" in found
    assert not {*heavy.split(), "scheduler_worker", "placement_worker"} & {*found}


def test_a_name_is_one_segment_of_the_path() -> None:
    assert [quoted(one) for one in ("a/b", "..", ".", "a b?c#d%2F", "\u20ac")] == [
        "a%2Fb", "%2E%2E", "%2E", "a%20b%3Fc%23d%252F", "%E2%82%AC",
    ]  # fmt: skip


def test_the_states_that_end_a_build_are_those_of_the_schedulers() -> None:
    assert set(ENDED_WITHOUT_MACHINE) == WITHOUT_MACHINE
