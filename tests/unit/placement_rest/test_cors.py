"""The headers for pages of other origins."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from placement_worker.rest.config import CorsConfig
from placement_worker.rest.cors import with_cors

PAGE = "https://page.example"
OTHER = "https://other.example"


async def answered(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def answer(config: CorsConfig, method: str, headers: dict[str, str]) -> httpx.Response:
    transport = httpx.ASGITransport(with_cors(answered, config))
    async with httpx.AsyncClient(transport=transport, base_url="http://book") as client:
        return await client.request(method, "/resource_providers", headers=headers)


def preflight(origin: str, method: str = "PUT", headers: str = "x-auth-token") -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": headers,
    }


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_pages_of_an_allowed_origin_may_read(allowed: str) -> None:
    """An origin of `*` allowed no page."""
    got = await answer(CorsConfig(allowed_origin=(allowed,)), "GET", {"origin": PAGE})
    assert (got.status_code, got.headers["access-control-allow-origin"]) == (204, PAGE)
    assert "Origin" in got.headers["vary"]


@pytest.mark.parametrize("allowed", [PAGE, "*"])
async def test_pages_of_an_allowed_origin_may_write(allowed: str) -> None:
    config = CorsConfig(allowed_origin=(allowed,), allow_headers=("X-Auth-Token",))
    got = await answer(config, "OPTIONS", preflight(PAGE))
    assert (got.status_code, got.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "PUT" in got.headers["access-control-allow-methods"]
    assert "x-auth-token" in got.headers["access-control-allow-headers"].lower()


@pytest.mark.parametrize(("method", "headers"), [("GET", {"origin": OTHER}), ("OPTIONS", preflight(OTHER))])
async def test_pages_of_another_origin_get_no_permission(method: str, headers: dict[str, str]) -> None:
    got = await answer(CorsConfig(allowed_origin=(PAGE,)), method, headers)
    assert "access-control-allow-origin" not in got.headers
    assert got.status_code == (200 if method == "OPTIONS" else 204)


async def test_a_header_that_is_not_allowed_is_not_named() -> None:
    got = await answer(CorsConfig(allowed_origin=(PAGE,)), "OPTIONS", preflight(PAGE, headers="x-other"))
    assert "x-other" not in got.headers["access-control-allow-headers"].lower()


async def test_without_an_origin_in_the_settings_there_is_no_cors() -> None:
    assert with_cors(answered, CorsConfig()) is answered
