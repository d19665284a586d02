"""An OpenID provider over real HTTP: discovery, keys that rotate, the device flow, and hostile answers."""

from __future__ import annotations

import base64
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs

from joserfc import jwt
from joserfc.jwk import ECKey, RSAKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.kit.keystone import served

CLIENT = "berth-cli"


class Issuer:
    """A provider. answers: what it answers at a path instead of the truth. pending: refusals before a token comes."""

    def __init__(self) -> None:
        self.url = ""
        self.key: RSAKey | ECKey = RSAKey.generate_key(2048, {"kid": "k1"})
        self.published: list[RSAKey | ECKey] = [self.key]
        self.asked: list[str] = []
        self.answers: dict[str, Response] = {}
        self.pending: list[str] = []
        self.claims: dict[str, Any] = {"sub": "alice", "roles": ["berth-admin"]}
        self.forms: list[dict[str, str]] = []
        paths = {
            "/.well-known/openid-configuration": (self.discovery, "GET"),
            "/keys": (self.keys, "GET"),
            "/device": (self.device, "POST"),
            "/token": (self.token, "POST"),
        }
        self.app = Starlette(routes=[Route(path, one, methods=[how]) for path, (one, how) in paths.items()])

    def rotate(self, kid: str, *, keeps: bool = False) -> None:
        self.key = ECKey.generate_key("P-256", {"kid": kid, "alg": "ES256"})
        self.published = [*(self.published if keeps else []), self.key]

    def signed(self, header: dict[str, Any] | None = None, key: Any = None, **claims: Any) -> str:
        """A token; a claim that is None is left out."""
        now = int(time.time())
        known = {"iss": self.url, "aud": CLIENT, "iat": now, "exp": now + 300, **self.claims, **claims}
        known = {name: value for name, value in known.items() if value is not None}
        alg = "RS256" if isinstance(self.key, RSAKey) else "ES256"
        header = {"alg": alg, "kid": self.key.kid, **(header or {})}
        return jwt.encode(header, known, key or self.key, algorithms=[header["alg"]])

    def unsigned(self, **claims: Any) -> str:
        """A token of alg none."""
        _, body, _ = self.signed(**claims).split(".")
        return f"{_part({'alg': 'none', 'kid': self.key.kid})}.{body}."

    def signed_by_public_key(self) -> str:
        """A token of HS256, by the public key as its secret."""
        _, body, _ = self.signed().split(".")
        signed = f"{_part({'alg': 'HS256', 'kid': self.key.kid})}.{body}"
        digest = hmac.digest(self.key.as_pem(private=False), signed.encode(), "sha256")
        return f"{signed}.{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"

    def asked_for(self, path: str) -> int:
        return self.asked.count(path)

    async def discovery(self, request: Request) -> Response:
        found = {
            "issuer": self.url,
            "jwks_uri": f"{self.url}/keys",
            "device_authorization_endpoint": f"{self.url}/device",
            "token_endpoint": f"{self.url}/token",
        }
        return self._answer(request, found)

    async def keys(self, request: Request) -> Response:
        return self._answer(request, {"keys": [one.as_dict(private=False) for one in self.published]})

    async def device(self, request: Request) -> Response:
        self.forms.append(await _form(request))
        found = {
            "device_code": "d",
            "user_code": "WDJB-MJHT",
            "verification_uri": f"{self.url}/code",
            "expires_in": 60,
            "interval": 2,
        }
        return self._answer(request, found)

    async def token(self, request: Request) -> Response:
        form = await _form(request)
        self.forms.append(form)
        right = {"grant_type": "urn:ietf:params:oauth:grant-type:device_code", "device_code": "d", "client_id": CLIENT}
        if form != right:
            return JSONResponse({"error": "invalid_grant"}, 400)
        if self.pending:
            return JSONResponse({"error": self.pending.pop(0)}, 400)
        found = {"id_token": self.signed(), "access_token": self.signed(aud="berth-api"), "token_type": "Bearer"}
        return self._answer(request, found)

    def _answer(self, request: Request, found: object) -> Response:
        self.asked.append(request.url.path)
        return self.answers.get(request.url.path) or JSONResponse(found)


def _part(fields: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(fields).encode()).rstrip(b"=").decode()


async def _form(request: Request) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs((await request.body()).decode()).items()}


@contextlib.asynccontextmanager
async def issuer_on_loopback() -> AsyncIterator[Issuer]:
    """One that listens on loopback."""
    issuer = Issuer()
    async with served(issuer.app) as issuer.url:
        yield issuer
