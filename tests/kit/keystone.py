"""A Keystone to sign in to, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Generator
from datetime import UTC, datetime, timedelta
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.kit.waiting import until

KEEP_ALIVE_S = 75  # a client that stood still finds its connection open


class KeystoneStandIn:
    """As much of Keystone as services see: tokens are given and validated."""

    def __init__(self) -> None:
        self.tokens: dict[str, dict[str, Any]] = {}
        self.services: set[str] = set()
        self.sign_ins = 0
        self.signed_in = 0
        self.methods: list[str] = []
        self.last_sign_in: dict[str, Any] = {}  # the last sign-in's body
        self.lasts = timedelta(hours=1)
        self.password = "right"
        self.issues = "service"  # how its tokens begin
        self.answer: Response | None = None
        self.sign_in_answer: Response | None = None
        routes = [Route("/v3/auth/tokens", self.show), Route("/v3/auth/tokens", self.sign_in, methods=["POST"])]
        self.app = Starlette(routes=routes)

    def add(self, token: str, lasts: timedelta, **more: Any) -> None:
        expires = (datetime.now(UTC) + lasts).strftime("%Y-%m-%dT%H:%M:%S.000000Z")
        self.tokens[token] = {
            "user": {"id": "u1", "name": "nova"},
            "expires_at": expires,
            "methods": ["password"],
            **more,
        }

    async def show(self, request: Request) -> Response:
        self.sign_ins += 1
        if self.answer is not None:
            return self.answer
        if request.headers["x-auth-token"] not in self.services:
            return Response(status_code=401)
        token = self.tokens.get(request.headers["x-subject-token"])
        return Response(status_code=404) if token is None else JSONResponse({"token": token})

    async def sign_in(self, request: Request) -> Response:
        self.signed_in += 1
        if self.sign_in_answer is not None:
            return self.sign_in_answer
        self.last_sign_in = await request.json()
        auth = self.last_sign_in["auth"]
        identity = auth["identity"]
        (method,) = identity["methods"]
        self.methods.append(method)
        given = identity[method]["user"]["password"] if method == "password" else identity[method]["secret"]
        # An application credential brings its own scope, and Keystone refuses another one.
        if given != self.password or ("scope" in auth) != (method == "password"):
            return Response(status_code=401)
        token = f"{self.issues}-{self.signed_in}"
        self.services.add(token)
        expires = (datetime.now(UTC) + self.lasts).strftime("%Y-%m-%dT%H:%M:%S.000000Z")
        return JSONResponse({"token": {"expires_at": expires}}, 201, headers={"X-Subject-Token": token})


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


@contextlib.asynccontextmanager
async def keystone_stand_in() -> AsyncIterator[tuple[KeystoneStandIn, str]]:
    """One that listens on loopback, and its address."""
    keystone = KeystoneStandIn()
    async with served(keystone.app) as url:
        yield keystone, url


@contextlib.asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[str]:
    """The address on loopback at which an application is served."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, lifespan="off", loop="none", timeout_keep_alive=KEEP_ALIVE_S)
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        await until(lambda: server.started)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
