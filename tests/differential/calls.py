"""A request as data: it can be written down, sent to two servers, and sent again in another story.

A generation is written as a mark instead of a number, and becomes one when it is sent, so that a story from which
requests were taken out still means "the right generation" or "one too many" of what is there then.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PROVIDER_MARK = "$provider_generation"
CONSUMER_MARK = "$consumer_generation"


@dataclass(frozen=True)
class Call:
    """One request. body: JSON data, or text that is sent as it is, or nothing."""

    method: str
    path: str
    version: str = "1.39"
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def minor(self) -> int:
        """The microversion's minor number, as far as there is one."""
        _, _, minor = self.version.partition(".")
        return int(minor) if minor.isdigit() else 0

    def to_json(self) -> dict[str, Any]:
        """As a line of a story."""
        data: dict[str, Any] = {"method": self.method, "path": self.path, "version": self.version}
        if self.body is not None:
            data["body"] = self.body
        if self.headers:
            data["headers"] = self.headers
        return data


def call_of(data: dict[str, Any]) -> Call:
    """A line of a story."""
    return Call(**data)


def provider_generation(uuid: str, plus: int = 0) -> dict[str, Any]:
    """A mark: the generation that this provider has when the request is sent, and a little more or less."""
    return {PROVIDER_MARK: uuid, "plus": plus}


def consumer_generation(uuid: str, plus: int = 0) -> dict[str, Any]:
    """A mark: the generation that this consumer has, None when it holds nothing."""
    return {CONSUMER_MARK: uuid, "plus": plus}


def resolved(body: Any, provider: Callable[[str], int], consumer: Callable[[str], int | None]) -> Any:
    """The body with every mark as the number it stands for."""
    if isinstance(body, list):
        return [resolved(item, provider, consumer) for item in body]
    if not isinstance(body, dict):
        return body
    if PROVIDER_MARK in body:
        return provider(body[PROVIDER_MARK]) + body["plus"]
    if CONSUMER_MARK in body:
        known = consumer(body[CONSUMER_MARK])
        return known if not body["plus"] else (known or 0) + body["plus"]
    return {key: resolved(value, provider, consumer) for key, value in body.items()}


def content_of(body: Any) -> bytes | None:
    """The body to send."""
    if body is None:
        return None
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()
