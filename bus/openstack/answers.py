"""One request to a service and its whole answer, bounded in time and in size."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

MAX_BYTES = 4 * 2**20  # a token with the catalogue of many regions


class AnswerTooLarge(httpx.HTTPError):
    """The answer has more bytes than its caller reads; the rest was not read."""


async def request(
    client: httpx.AsyncClient, method: str, url: str, *, max_bytes: int = MAX_BYTES, timeout_s: float = 0, **more: Any
) -> httpx.Response:
    """The answer to one request. timeout_s: for the whole of it (0: httpx's own bounds, which bound each wait and not
    their sum). more: as httpx takes it. Raises TimeoutError, AnswerTooLarge, httpx.HTTPError, and what the client's
    sign-in raises.
    """
    body = bytearray()
    async with asyncio.timeout(timeout_s or client.timeout.read), client.stream(method, url, **more) as answer:
        async for chunk in answer.aiter_bytes():
            body += chunk
            if len(body) > max_bytes:
                raise AnswerTooLarge(f"an answer of more than {max_bytes} bytes")
    headers = [(name, text) for name, text in answer.headers.items() if name != "content-encoding"]  # it is decoded
    return httpx.Response(answer.status_code, headers=headers, content=bytes(body))
