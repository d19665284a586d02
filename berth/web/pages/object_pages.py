"""The pages of what operators define: all objects, the form of one, and the log of changes.

A form has a field for each field of the object's message; the page's script makes the object's body of them, and
`/api/v1` checks it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from berth.change_log import SECTIONS, describe_change
from berth.text import printable
from berth.web.api import caller_of, need, parsed
from berth.web.pages.objects import ObjectApi, zones_of
from berth.web.problems import Problem
from berth.web.rendering import Asked, LastAnswers, rendered, unanswered_page
from berth.web.sign_in_sessions import WebRole
from bus.contracts.base import Label, Version
from bus.contracts.objects import SCHEDULING, CellState, ObjectKind, ObjectLogPage, ObjectLogQuery
from bus.contracts.placement import GroupPolicy

PAGE = 200
LOG_PAGE = 50


class FormField(Struct, frozen=True):
    """A field of a form. name: of the message's field, a field of a field behind a dot.

    kind: `number`, `text`, `flag`, `choice`; `pairs` (KEY = VALUE, one a line), `amounts` (the values are numbers),
    `lines` (one a line); `given` before the last two kinds: without a mark the object has no such field.
    """

    name: str
    label: str
    kind: str
    hint: str = ""
    choices: tuple[str, ...] = ()
    initial: Any = None


class FilledField(Struct, frozen=True):
    """A field with its value as text. given: whether the object has it."""

    field: FormField
    value: str
    given: bool


FORMS: dict[ObjectKind, tuple[FormField, ...]] = {
    ObjectKind.FLAVOR: (
        FormField("vcpus", "CPUs", "number", "VCPU", initial=1),
        FormField("memory_mb", "Memory, MiB", "number", "MEMORY_MB", initial=1024),
        FormField("disk_gb", "Disk, GiB", "number", "DISK_GB", initial=10),
        FormField("extra_specs", "Extra specs", "pairs", "One a line, as in Nova: trait:HW_CPU_X86_AVX2 = required"),
        FormField("projects", "Only for these projects", "lines", "One a line; none: for every project"),
    ),
    ObjectKind.AGGREGATE: (
        FormField("uuid", "Provider aggregate", "text", "The UUID that placement has for it"),
        FormField("metadata", "Metadata", "pairs", "One a line; availability_zone = NAME makes it a zone"),
        FormField("hosts", "Hosts are set here", "given lines", "Names or UUIDs, one a line; else by Placement's API"),
    ),
    ObjectKind.QUOTA: (
        FormField(
            "limits",
            "Limits",
            "amounts",
            "One a line: INSTANCES, or a resource class",
            initial={"INSTANCES": 10, "VCPU": 20},
        ),
    ),
    ObjectKind.GROUP: (
        FormField(
            "policy", "Policy", "choice", choices=tuple(one.value for one in GroupPolicy), initial="anti-affinity"
        ),
        FormField("max_per_host", "Members that may share a host", "number", "With anti-affinity", initial=1),
        FormField("uuid", "UUID", "text", "None: it follows from the name"),
    ),
    ObjectKind.SCHEDULING: (
        FormField("multipliers", "Multipliers are set here", "given amounts", "WEIGHER = NUMBER, one a line"),
        FormField("enabled_filters", "Filters are set here", "given lines", "In order, one a line"),
        FormField("enabled_weighers", "Weighers are set here", "given lines", "In order, one a line"),
        FormField("host_subset_size", "Hosts to draw from", "number", "None: as the settings say"),
    ),
    ObjectKind.CELL: (
        FormField("state", "State", "choice", choices=tuple(one.value for one in CellState), initial="disabled"),
        FormField("reason", "Reason of the state", "text"),
        FormField(name="bus.url_file", label="File of the bus's URL", kind="text", hint="If no settings name it"),
        FormField(name="bus.url_variable", label="Variable of the bus's URL", kind="text", hint="Begins with CELL_"),
        FormField(name="bus.prefix", label="Prefix on the bus", kind="text"),
        FormField("abandoned", "Remove it though instances are on record there", "flag"),
    ),
}


class ObjectPages:
    """The handlers of these pages."""

    def __init__(self, objects: ObjectApi, *, last: LastAnswers, has_session: bool) -> None:
        self._objects = objects
        self._last = last
        self._has_session = has_session

    def routes(self) -> list[Route]:
        """The routes of the pages."""
        return [
            Route("/objects", self.objects),
            Route("/objects/log", self.log),
            Route("/objects/{section}", self.edit_object),
        ]

    async def objects(self, request: Request) -> Response:
        """All objects, and quotas beside what is used."""
        need(caller_of(request), WebRole.READER)
        asked = Asked(self._last)
        revision, found = await asked.of(self._objects.stored(), without=(0, []), question="objects")
        quotas = await asked.of(self._objects.quotas(), without=[], question="quotas")
        of_kind = {kind: [one for one in found if one.kind is kind] for kind in SECTIONS}
        return self._page(
            request,
            "objects.html",
            asked=asked,
            revision=revision,
            flavors=of_kind[ObjectKind.FLAVOR],
            aggregates=of_kind[ObjectKind.AGGREGATE],
            groups=of_kind[ObjectKind.GROUP],
            rules=of_kind[ObjectKind.SCHEDULING],
            zones=zones_of(of_kind[ObjectKind.AGGREGATE]),
            quotas=quotas[:PAGE],
        )

    async def log(self, request: Request) -> Response:
        """The log of changes, newest first, as sentences."""
        need(caller_of(request), WebRole.READER)
        params = request.query_params
        fields: dict[str, Any] = {"kind": params.get("kind") or None, "name": params.get("name") or None}
        if params.get("before"):
            fields["before"] = parsed(lambda: msgspec.convert(params["before"], Version, strict=False))
        if params.get("before_object"):
            kind, _, name = params["before_object"].partition("/")
            fields["before_object"] = (kind, name)
        query = parsed(lambda: msgspec.convert({**fields, "limit": LOG_PAGE}, ObjectLogQuery))
        asked = Asked(self._last)
        page = await asked.of(self._objects.log(query), without=ObjectLogPage(), question=query)
        older = ""
        if len(page.entries) == LOG_PAGE:
            end = page.entries[-1]
            kept = {name: value for name in ("kind", "name") if (value := params.get(name))}
            older = urlencode({**kept, "before": end.revision, "before_object": f"{end.kind.value}/{end.name}"})
        return self._page(
            request,
            "log.html",
            asked=asked,
            entries=[describe_change(one) for one in page.entries],
            older=older,
            kinds=list(ObjectKind),
            query=params,
        )

    async def edit_object(self, request: Request) -> Response:
        """The form that makes, changes or deletes one object."""
        need(caller_of(request), WebRole.OPERATOR)
        section = request.path_params["section"]
        kind = next((kind for kind, name in SECTIONS.items() if name == section), None)
        if kind is None:
            raise Problem(404, "path.unknown", f"there are no {section[:64]}")
        name = request.query_params.get("name", SCHEDULING if kind is ObjectKind.SCHEDULING else "")
        stored, asked = None, Asked()
        if name:
            known = await asked.of(
                self._objects.stored(kind, parsed(lambda: msgspec.convert(name, Label))), without=None
            )
            if known is None:
                return unanswered_page(request, asked, f"{kind.capitalize()} {name}", has_session=self._has_session)
            stored = known[1][0] if known[1] else None
        members = None
        if stored is not None and kind is ObjectKind.GROUP:
            members = await asked.of(self._objects.group(stored), without=None)
        return self._page(
            request,
            "object.html",
            asked=asked,
            kind=kind,
            section=section,
            name=name,
            stored=stored,
            fields=filled(kind, None if stored is None else stored.body),
            members=members,
        )

    def _page(self, request: Request, template: str, status: int = 200, **fields: Any) -> Response:
        return rendered(request, template, status, has_session=self._has_session, **fields)


def filled(kind: ObjectKind, body: Mapping[str, Any] | None) -> list[FilledField]:
    """The form of an object, or of a new one with initial values."""
    found = []
    for field in FORMS[kind]:
        value: Any = field.initial if body is None else body
        if body is not None:
            for part in field.name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
        found.append(FilledField(field, _text(value), value is not None and value is not False))
    return found


def _text(value: Any) -> str:
    """A value as it is typed into its field; the page's script reads it back."""
    if isinstance(value, Mapping):
        return "\n".join(f"{_quoted(str(key), '=')} = {_quoted(str(of))}" for key, of in value.items())
    if isinstance(value, (list, tuple)):
        return "\n".join(_quoted(str(one)) for one in value)
    return "" if value is None else _quoted(str(value))


def _quoted(text: str, besides: str = "") -> str:
    """As it is, or as JSON where that would be read as something else, or turns the writing around."""
    plain = text == printable(text) and text == text.strip() and not text.startswith('"')
    return text if text and plain and not (besides and besides in text) else json.dumps(text)
