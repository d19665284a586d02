"""Templates, and what they make of text, times and numbers from outside."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from jinja2 import Environment, PackageLoader, select_autoescape
from starlette.requests import Request
from starlette.responses import Response

from berth.text import age, printable
from berth.web.problems import Problem, problem_of
from bus.faults import Fault, Transient
from bus.transport import BusError

T = TypeVar("T")
UNANSWERED = (429, 503, 504)  # statuses of problems that end by themselves


def rendered(request: Request, template: str, status: int = 200, asked: Asked | None = None, **fields: Any) -> Response:
    """A page for the caller of a request. asked: what others were asked for it."""
    asked = asked or Asked()
    status = status if asked.problem is None else asked.status
    caller = getattr(request.state, "caller", None)
    nav = getattr(request.state, "nav", ())
    page = TEMPLATES.get_template(template).render(
        path=request.url.path, who=caller, nav=nav, unanswered=asked.problem, **fields
    )
    return Response(page, status, {"cache-control": "no-store"}, "text/html")


class Asked:
    """What a page asks others. problem: why it shows only a part; None while all have answered."""

    def __init__(self) -> None:
        self.problem: Problem | None = None

    async def of(self, answer: Awaitable[T], *, without: T) -> T:
        """The answer, or what the page shows without any. Raises Fault of a refusal."""
        try:
            return await answer
        except (Fault, BusError, Transient) as fault:
            problem = problem_of(fault)
            if problem is None or problem.status not in UNANSWERED:
                raise
            self.problem = problem
            return without

    @property
    def status(self) -> int:
        """Of the page: it is whole for a person, and no success for a program."""
        return 200 if self.problem is None else self.problem.status


def problem_page(request: Request, problem: Problem) -> Response:
    """An error for a person."""
    response = rendered(request, "problem.html", problem.status, problem=problem)
    response.headers.update(problem.headers)
    return response


def compact(value: object) -> str:
    """A value as one line of JSON, what is not printable escaped."""
    return printable(json.dumps(msgspec.to_builtins(value), ensure_ascii=False, separators=(", ", ": ")))


def _when(at: float | None) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S") if at else ""


def _moment(at: float | None) -> str:
    """With milliseconds, for what happens within a second."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] if at else ""


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("berth.web"), autoescape=select_autoescape(), trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "when": _when,
        "moment": _moment,
        "duration": _duration,
        "age": age,
        "text": lambda text: printable(str(text)),
        "compact": compact,
        "json": lambda value: json.dumps(msgspec.to_builtins(value), indent=2),
    }
    return environment


TEMPLATES = _templates()
