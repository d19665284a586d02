"""`/api/v1`: builds and hosts over HTTP. Each answer is a scheduler's reply on the bus; nothing is kept here."""

from __future__ import annotations

import asyncio
import difflib
import math
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from functools import partial, wraps
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from berth.bus_client.host_pages import json_of, read_hosts
from berth.client.types import Accepted, Builds
from berth.web.event_stream import Live, TooManyEventFollowers
from berth.web.problems import Problem
from berth.web.sign_in_sessions import WebCaller, WebRole, check_rights
from bus.bus import Bus
from bus.clock import new_uuid
from bus.contracts.base import Message, Uuid, reason_of
from bus.contracts.build import (
    ENDED_WITHOUT_MACHINE,
    OFF_RECORD,
    TERMINAL_STATES,
    BuildAccepted,
    BuildEvent,
    BuildPage,
    BuildQuery,
    BuildRecord,
    BuildRequest,
    BuildState,
    DeleteRequest,
    HostsPage,
    HostsQuery,
    seen_by,
)
from bus.door import request_in_turn
from bus.fair_queue import Turns
from bus.faults import Fault
from bus.transport import BusError

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
API_ROOT = "/api/v1"
# A build request as JSON; the largest that is valid is smaller.
MAX_BODY_BYTES = 256 * 1024
ASK_TIMEOUT_S = 10.0
BODY_TIMEOUT_S = 30.0
# A comment is sent after so long a silence, so that proxies keep the stream open.
KEEP_ALIVE_S = 15.0
CHECK_AGAIN_S = 10.0
MAX_PAGE = 1_000
MAX_HOSTS = 100_000
DEFAULT_PROJECT = "default"

_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]{1,64})`")

T = TypeVar("T")
Body = TypeVar("Body", bound=Struct)
AnyMessage = TypeVar("AnyMessage", bound=Message)


# The conditions of a search for builds beside their project, state and time.
SEARCHED_BY = ("cell", "host", "flavor", "code")
FOUND_BY = ("gang", "name", *SEARCHED_BY)


def checked(*query: str, role: WebRole | None = None) -> Callable[[Callable[[Any, Request], Awaitable[object]]], Any]:
    """Check a request before its handler. query: the parameters that it knows. role: the least that its caller has. The
    handler's answer is a Response, or data that become JSON.
    """

    def wrapped(handle: Callable[[Any, Request], Awaitable[object]]) -> Any:
        @wraps(handle)
        async def called(self: Any, request: Request) -> Response:
            if role is not None:
                need(caller_of(request), role)
            only(request, *query)
            answer = await handle(self, request)
            return answer if isinstance(answer, Response) else json_response(answer)

        return called

    return wrapped


def route(
    method: str, path: str, *query: str, role: WebRole | None = None
) -> Callable[[Callable[[Any, Request], Awaitable[object]]], Any]:
    """Mark a handler with its route, and check its requests."""

    def marked(handle: Callable[[Any, Request], Awaitable[object]]) -> Any:
        called = checked(*query, role=role)(handle)
        called.route = path, method
        return called

    return marked


class Handlers:
    """Handlers that `route` marks. Each takes a request of a caller that is known (`request.state.caller`)."""

    def routes(self) -> list[Route]:
        """The routes below API_ROOT."""
        marked = {name: one.route for name, one in vars(type(self)).items() if hasattr(one, "route")}
        return [Route(path, getattr(self, name), methods=[method]) for name, (path, method) in marked.items()]


class WebApi(Handlers):
    """The handlers. Each takes a request of a caller that is known (`request.state.caller`)."""

    def __init__(self, bus: Bus, live: Live, rng: random.Random) -> None:
        self._bus = bus
        self._live = live
        self._rng = rng
        self._turns = Turns()

    async def send(self, message: Message, reply: type[AnyMessage], cause: str) -> AnyMessage:
        """Request something of a project, when it has its turn: one project's requests keep no other's waiting."""
        return await request_in_turn(self._bus, self._turns, message, reply, timeout_s=ASK_TIMEOUT_S, cause=cause)

    # --- builds

    @route("POST", "/builds")
    async def create_build(self, request: Request) -> object:
        """Ask for a machine, or several that start together. Idempotent by instance_uuid; without, one is made up. A
        project's own token leaves project_id out; of others that do, it is DEFAULT_PROJECT.
        """
        caller = caller_of(request)
        fields = await object_of(request)
        fields.setdefault("instance_uuid", new_uuid(self._rng))
        may_change(caller)
        project = fields.setdefault("project_id", caller.project or DEFAULT_PROJECT)
        if caller.project not in (None, project):
            raise Problem(403, "project.forbidden", f"this token builds for project {caller.project}")
        build = message_of({**fields, "by": caller.name}, BuildRequest, caller)
        reply = await self.send(build, BuildAccepted, build.instance_uuid)
        return _accepted(build.instance_uuid, reply.members)

    @route("GET", "/builds", "project", "state", *FOUND_BY, "after", "before", "before_instance", "limit")
    async def list_builds(self, request: Request) -> object:
        """Builds, newest first: ?project=&state=&name=&cell=&host=&flavor=&code=&gang=&after=&before=&limit=."""
        query, caller = request.query_params, caller_of(request)
        project = query.get("project", caller.sees)
        if caller.sees is not None and project != caller.sees:
            raise Problem(403, "project.forbidden", f"this token sees project {caller.sees}")
        limit = number_of(request, "limit", 100, most=MAX_PAGE)
        page = await self.builds(
            parsed(
                lambda: msgspec.convert(
                    {
                        "project_id": project,
                        "state": query.get("state"),
                        **{name: query.get(name) for name in FOUND_BY},
                        "after": moment_of(query.get("after")),
                        "before": moment_of(query.get("before")),
                        "before_instance": query.get("before_instance"),
                        "limit": limit,
                        "count": True,
                    },
                    BuildQuery,
                )
            )
        )
        further = next_page(request, page, limit)
        following = None if further is None else f"{request.url.path}?{further}"
        return Builds(tuple(as_seen(one, caller) for one in page.builds), following, page.total)

    @route("GET", "/builds/{uuid}")
    async def show_build(self, request: Request) -> object:
        """One build with its timeline."""
        return await self.build(uuid_of(request), caller_of(request))

    @route("DELETE", "/builds/{uuid}")
    async def delete_build(self, request: Request) -> object:
        """Delete the machine, or stop its build. Idempotent."""
        build = await self.build(uuid_of(request), caller_of(request), to_change=True)
        by = caller_of(request).name
        delete = DeleteRequest(instance_uuid=build.instance_uuid, project_id=build.project_id, by=by)
        await self.send(delete, BuildAccepted, build.instance_uuid)
        return _accepted(build.instance_uuid)

    async def builds(self, query: BuildQuery) -> BuildPage:
        """Ask a scheduler for a page of builds."""
        return await self._bus.request(query, BuildPage, timeout_s=ASK_TIMEOUT_S)

    async def build(self, uuid: str, caller: WebCaller, *, to_change: bool = False) -> BuildRecord:
        """One build that the caller may see (and change). Raises Problem 404 for another project's as for none."""
        page = await self.builds(BuildQuery(instance_uuid=uuid))
        found = next((one for one in page.builds if caller.sees in (None, one.project_id)), None)
        if found is None:
            raise Problem(404, "build.unknown", f"no build {uuid} is on record")
        if to_change:
            may_change(caller)
        return as_seen(found, caller)

    # --- hosts

    @route("GET", "/hosts", "cell", "up", "limit", role=WebRole.READER)
    async def list_hosts(self, request: Request) -> object:
        """Hosts with what is used of each class: ?cell=&up=true|false&limit=. Not for role project."""
        query = request.query_params
        requested = {
            "cell": query.get("cell"),
            "up": truth_of(request, "up"),
            "limit": number_of(request, "limit", 1000, most=MAX_HOSTS),
        }
        page = await self.hosts(parsed(lambda: msgspec.convert(requested, HostsQuery)))
        return Response(await json_of(page.hosts), media_type=JSON)

    async def hosts(self, query: HostsQuery) -> HostsPage:
        """Ask a scheduler for hosts."""
        return await read_hosts(self._bus, query, timeout_s=ASK_TIMEOUT_S)

    # --- streams

    @route("GET", "/builds/{uuid}/events", "until")
    async def follow_build(self, request: Request) -> object:
        """Server-sent events of one build, from its present state to its end: ?until=deleted goes on beyond active."""
        uuid = uuid_of(request)
        build = await self.build(uuid, caller_of(request))  # 404 before the stream begins
        until = request.query_params.get("until", "end")
        if until not in ("end", "deleted"):
            raise Problem(400, "request.invalid", "until is end or deleted")
        ends = frozenset(ENDED_WITHOUT_MACHINE) if until == "deleted" else TERMINAL_STATES
        # Any project may name the uuid in a request of its own.
        named = uuid, build.project_id
        return self._stream(
            request, lambda event: (event.instance_uuid, event.project_id) == named, uuid=uuid, ends=ends
        )

    @route("GET", "/events")
    async def follow_all(self, request: Request) -> object:
        """Server-sent events of all builds that the caller sees."""
        sees = caller_of(request).sees
        return self._stream(request, lambda event: sees in (None, event.project_id))

    def _stream(
        self,
        request: Request,
        wanted: Callable[[BuildEvent], bool],
        *,
        uuid: str = "",
        ends: frozenset[BuildState] = frozenset(),
    ) -> Response:
        caller = caller_of(request)

        async def events() -> AsyncIterator[bytes]:
            with self._live.follow(wanted, caller=caller.name, project=caller.sees) as follower:
                if uuid:
                    # Read after the follower listens, so no event falls in between.
                    record = await self.build(uuid, caller)
                    yield sse("build", record)
                    if record.state in ends:
                        return
                while not follower.closed:
                    events_received = await follower.next(KEEP_ALIVE_S)
                    if follower.lagged:
                        yield sse("lagged", {"code": "stream.lagged"})
                        return
                    for event in events_received:
                        yield sse("event", event)
                        if event.terminal and event.sequence != OFF_RECORD and event.state in ends:
                            return
                    if not events_received:
                        yield b": nothing happened\n\n"

        return stream_response(events(), partial(check_again, request))


def as_seen(build: BuildRecord, caller: WebCaller) -> BuildRecord:
    """The build with what the caller may know."""
    return build if caller.sees is None else seen_by(build, caller.sees)


def caller_of(request: Request) -> WebCaller:
    """The caller that the application has found."""
    caller = request.state.caller
    assert isinstance(caller, WebCaller)
    return caller


def need(caller: WebCaller, role: WebRole) -> None:
    """Raises Problem 403 when the caller's role is less."""
    if caller.role < role:
        raise Problem(403, "role.forbidden", f"this needs role {role.name.lower()}")


def may_change(caller: WebCaller) -> None:
    """Raises Problem 403 for a caller that only sees."""
    if caller.role is WebRole.READER:
        raise Problem(403, "role.forbidden", "a reader changes nothing")


def json_response(data: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Data as JSON."""
    return Response(msgspec.json.encode(data), status, headers, JSON)


async def check_again(request: Request) -> None:
    """Raises Problem 401 or 403 when the caller may not any more what it might when the request came."""
    try:
        found = await request.state.find_caller()
    except Problem as problem:
        if problem.status in (401, 403):
            raise
        return  # Keystone does not answer now
    if found != caller_of(request):
        raise Problem(401, "auth.required", "the token has other permissions now")


def stream_response(events: AsyncIterator[bytes], check: Callable[[], Awaitable[None]]) -> StreamingResponse:
    """A stream of server-sent events. It ends with `lagged` when too many follow, a scheduler does not answer, or the
    check, which is made every CHECK_AGAIN_S at most, raises Problem.
    """

    async def guarded() -> AsyncIterator[bytes]:
        checked_at = time.monotonic()
        try:
            async for event in events:
                if time.monotonic() - checked_at >= CHECK_AGAIN_S:
                    await check()
                    checked_at = time.monotonic()
                yield event
        except TooManyEventFollowers:
            yield sse("lagged", {"code": "stream.too_many"})
        except (Fault, BusError, Problem) as fault:  # the status was sent before
            yield sse("lagged", {"code": fault.code})

    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(guarded(), headers=headers, media_type=EVENT_STREAM)


def sse(name: str, data: object) -> bytes:
    """One server-sent event: JSON has no line breaks of its own."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"


async def body_of(request: Request, most: int = MAX_BODY_BYTES) -> bytes:
    """The whole body. Raises Problem 413 as soon as it is too long, 408 when it has not come in time."""
    received = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                received += piece
                if len(received) > most:
                    raise Problem(413, "request.too_large", f"at most {most} bytes")
    except ClientDisconnect:
        raise Problem(400, "request.cut_short", "its sender has left before its body had come") from None
    except TimeoutError:
        raise Problem(408, "request.timeout", f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
    return bytes(received)


async def object_of(request: Request) -> dict[str, object]:
    """The JSON object of the body. Raises Problem 400, 413 or 415."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise Problem(415, "request.media_type", f"the body is {JSON}")
    body = await body_of(request)
    try:
        return msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, "request.malformed", reason_of(error)) from None


def converted(fields: dict[str, object], kind: type[Body]) -> Body:
    """A body's fields as a struct; the nearest field is offered for one that there is not. Raises Problem 400."""
    if "type" in fields:
        raise Problem(400, "request.invalid", "`type` is the bus's own field")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        reason = reason_of(error)
        unknown = _UNKNOWN_FIELD.search(reason)
        known = [field.name for field in msgspec.structs.fields(kind)]
        near = difflib.get_close_matches(unknown[1], known, n=1) if unknown else []
        hint = f"; did you mean `{near[0]}`?" if near else ""
        raise Problem(400, "request.invalid", reason + hint) from None


def message_of(fields: dict[str, object], kind: type[AnyMessage], caller: WebCaller) -> AnyMessage:
    """A body's fields as a message that this caller may publish. Raises Problem 400 and 403."""
    message = converted(fields, kind)
    check_rights(caller, message)
    return message


def parsed(make: Callable[[], T]) -> T:
    """The result of `make` for parameters. Raises Problem 400."""
    try:
        return make()
    except (msgspec.ValidationError, ValueError) as error:
        raise Problem(400, "request.invalid", reason_of(error)) from None


def moment_of(text: str | None) -> float | None:
    """Seconds since the epoch, of a number or of ISO 8601 (UTC where it names no zone). Raises ValueError."""
    if not text:
        return None
    try:
        found = float(text)
    except ValueError:
        at = datetime.fromisoformat(text)
        found = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(found):
        raise ValueError(f"{text!r} is no time")
    return found


def next_page(request: Request, page: BuildPage, limit: int) -> str | None:
    """The parameters of the page after this one; None: there is none."""
    before, instance = page.searched_to, page.searched_to_instance
    if len(page.builds) == limit:
        before, instance = page.builds[-1].created_at, page.builds[-1].instance_uuid
    if before is None:
        return None
    place = {"before": before, **({"before_instance": instance} if instance is not None else {})}
    return request.url.remove_query_params("before_instance").include_query_params(**place).query


def uuid_of(request: Request) -> str:
    """The uuid in the path. Raises Problem 400."""
    return parsed(lambda: msgspec.convert(request.path_params["uuid"], Uuid))


def only(request: Request, *known: str) -> None:
    """Raises Problem 400 for a parameter that there is not."""
    for name in request.query_params:
        if name not in known:
            raise Problem(400, "request.invalid", f"unknown parameter {name[:64]!r}; known are {', '.join(known)}")


def number_of(request: Request, name: str, default: int, *, most: int) -> int:
    """A parameter that is a number from 1 to `most`. Raises Problem 400."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= most):
        raise Problem(400, "request.invalid", f"{name} is a number from 1 to {most}")
    return int(text)


def truth_of(request: Request, name: str) -> bool | None:
    """A parameter that is true or false; None when it is not given. Raises Problem 400."""
    text = request.query_params.get(name)
    if text not in (None, "true", "false"):
        raise Problem(400, "request.invalid", f"{name} is true or false")
    return None if text is None else text == "true"


def _accepted(uuid: str, members: tuple[str, ...] = ()) -> Response:
    here = f"{API_ROOT}/builds/{uuid}"
    body = Accepted(uuid, {"self": here, "events": f"{here}/events"}, members)
    return json_response(body, 202, {"location": here})
