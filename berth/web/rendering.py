"""Templates, and what they make of text, times and numbers from outside."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Hashable
from datetime import UTC, datetime
from typing import Any, TypeVar, cast

import msgspec
from jinja2 import Environment, PackageLoader, select_autoescape
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from berth.text import age, printable
from berth.web.problems import Problem, problem_of
from berth.web.sign_in_sessions import WebCaller, WebRole
from bus.clock import Clock
from bus.faults import Fault, Transient
from bus.transport import BusError

T = TypeVar("T")
UNANSWERED = (429, 503, 504)  # statuses of problems that end by themselves
NO_SCHEDULER = 504
SILENT_FOR_S = 5.0
# Answers that are kept for pages without a scheduler: the newest of so many questions.
MAX_KEPT = 64
HOSTS = (None, "hosts")  # all hosts, which several pages show


class Section(Struct, frozen=True):
    """A part of the pages. tabs: its pages by name, where there are several. below: paths of pages that no list names.

    roles: who sees it named.
    """

    name: str
    path: str
    tabs: tuple[tuple[str, str], ...] = ()
    below: tuple[str, ...] = ()
    roles: frozenset[WebRole] = frozenset({WebRole.READER, WebRole.OPERATOR})

    def has(self, path: str) -> bool:
        """Whether this page belongs to it."""
        starts = (*(address for _, address in self.tabs), *self.below, *((self.path,) if self.path != "/" else ()))
        return path == self.path or any(path == start or path.startswith(f"{start}/") for start in starts)

    def tab(self, path: str) -> str:
        """The address of the tab that a page is in: the longest that its own begins with."""
        found = [address for _, address in self.tabs if path == address or path.startswith(f"{address}/")]
        return max(found, key=len, default="")


class LastAnswers:
    """What schedulers last answered to each question of a page, for the time in which none answers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: dict[Hashable, tuple[float, Any]] = {}
        self._silence: tuple[float, Problem] | None = None

    def note_silence(self, problem: Problem) -> None:
        """No scheduler has answered in time: for SILENT_FOR_S pages do not wait for one again."""
        self._silence = self._clock.monotonic(), problem

    @property
    def silence(self) -> Problem | None:
        """Why no scheduler need be asked just now."""
        if self._silence is None or self._clock.monotonic() - self._silence[0] > SILENT_FOR_S:
            return None
        return self._silence[1]

    def keep(self, question: Hashable, answer: object) -> None:
        """Keep this one; that which has not been asked for longest goes."""
        self._kept.pop(question, None)
        self._kept[question] = self._clock.time(), answer
        if len(self._kept) > MAX_KEPT:
            del self._kept[next(iter(self._kept))]

    def find(self, question: Hashable) -> tuple[float, Any] | None:
        """When it was answered, and the answer."""
        return self._kept.get(question)


class Asked:
    """What a page asks others. problem: why it shows only a part; None while all have answered. as_of: when the oldest
    answer was given that stands in for one that has not come.
    """

    def __init__(self, last: LastAnswers | None = None, caller: WebCaller | None = None) -> None:
        self.problem: Problem | None = None
        self.as_of: float | None = None
        self._last = last
        self._sees = None if caller is None else caller.sees

    async def of(
        self, answer: Coroutine[Any, Any, T], *, without: T, question: Hashable = None, by_others: bool = False
    ) -> T:
        """The answer, the last one to this question that the caller's project may see, or what the page shows without
        any. by_others: no scheduler gives it. Raises Fault of a refusal.
        """
        silence = None if self._last is None or by_others else self._last.silence
        try:
            if silence is not None:
                answer.close()
                raise Problem(silence.status, silence.code, silence.detail)
            found = await answer
        except (Fault, BusError, Transient, Problem) as fault:
            problem = problem_of(fault)
            if problem is None or problem.status not in UNANSWERED:
                raise
            self.problem = problem
            if self._last is not None and problem.status == NO_SCHEDULER and not by_others and silence is None:
                self._last.note_silence(problem)
            kept = None if self._last is None or question is None else self._last.find((self._sees, question))
            if kept is None:
                return without
            self.as_of = kept[0] if self.as_of is None else min(kept[0], self.as_of)
            return cast(T, kept[1])
        if self._last is not None and question is not None:
            self._last.keep((self._sees, question), found)
        return found

    @property
    def status(self) -> int:
        """Of the page: it is whole for a person, and no success for a program."""
        return 200 if self.problem is None else self.problem.status


def rendered(request: Request, template: str, status: int = 200, asked: Asked | None = None, **fields: Any) -> Response:
    """A page for the caller of a request. asked: what others were asked for it."""
    asked = asked or Asked()
    status = status if asked.problem is None else asked.status
    caller = getattr(request.state, "caller", None)
    path = request.url.path
    nav: tuple[Section, ...] = getattr(request.state, "nav", ())
    shown = [one for one in nav if caller is not None and caller.role in one.roles]
    page = TEMPLATES.get_template(template).render(
        path=path,
        who=caller,
        nav=shown,
        part=next((one for one in shown if one.has(path)), None),
        unanswered=asked.problem,
        as_of=asked.as_of,
        **fields,
    )
    return Response(page, status, {"cache-control": "no-store"}, "text/html")


def unanswered_page(request: Request, asked: Asked, title: str, *, has_session: bool) -> Response:
    """A page about one thing of which nothing is known while no scheduler answers."""
    return rendered(request, "unanswered.html", asked=asked, title=title, has_session=has_session)


def problem_page(request: Request, problem: Problem) -> Response:
    """An error for a person."""
    response = rendered(request, "problem.html", problem.status, problem=problem)
    response.headers.update(problem.headers)
    return response


# The usual names of the usual resource classes.
RESOURCES = {"VCPU": "CPUs", "MEMORY_MB": "Memory", "DISK_GB": "Disk", "INSTANCES": "Instances"}


def compact(value: object) -> str:
    """A value as one line of JSON, what is not printable escaped."""
    return printable(json.dumps(msgspec.to_builtins(value), ensure_ascii=False, separators=(", ", ": ")))


def when(at: float | None) -> str:
    """A time, UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S") if at else ""


def _short(uuid: str) -> str:
    """A UUID as lists show it: its first eight digits are enough to tell two apart there."""
    return uuid[:8]


def _size(amount: float, resource_class: str = "") -> str:
    """An amount for a person: memory and disk in the unit that leaves one to three digits."""
    units = {"MEMORY_MB": ("MiB", "GiB", "TiB", "PiB"), "DISK_GB": ("GiB", "TiB", "PiB")}.get(resource_class)
    if units is None:
        return f"{amount:,.0f}" if amount == int(amount) else f"{amount:,.1f}"
    for unit in units[:-1]:
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:,.1f} {units[-1]}"


def _percent(share: float) -> str:
    """A share as a person reads it: what is there is never 0 %, and what is left never nothing."""
    if 0 < share < 0.1:
        return "under 0.1 %"
    if 99.9 < share < 100:
        return "over 99.9 %"
    return f"{share:.1f} %".replace(".0 %", " %")


def _slug(state: object) -> str:
    """The class of a state in the style sheet, which has its colour and its shape."""
    return str(state).replace(" ", "-").replace("_", "-").lower()


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
        "when": when,
        "short": _short,
        "size": _size,
        "percent": _percent,
        "slug": _slug,
        "resource": lambda name: RESOURCES.get(name, name),
        "moment": _moment,
        "duration": _duration,
        "age": age,
        "text": lambda text: printable(str(text)),
        "compact": compact,
        "json": lambda value: json.dumps(msgspec.to_builtins(value), indent=2),
    }
    return environment


TEMPLATES = _templates()
