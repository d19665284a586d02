"""The pages' templates read only variables that their handlers pass and fields that the passed values have.

Jinja renders a missing field as nothing, and mypy does not look into templates: a renamed field would leave a hole in a
page. Here each expression of each template is typed from the declared types below.
"""

from __future__ import annotations

import ast
import enum
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Union

import pytest
from jinja2 import nodes

from berth.change_log import DescribedChange
from berth.client.repair_types import BreakerView, DeadLetterCount, DeadLetterView, QuarantinePage, Recovery
from berth.client.types import CellView, GroupView, HostDetail, NodesView, QuotaUse, Why, Zone
from berth.web.history import Chart
from berth.web.pages.figures import FailureGroup, ListedHost, MetalClass, Use
from berth.web.pages.fleet import HostChange
from berth.web.pages.instances import LostClaim, Now, Stage
from berth.web.pages.nova_calls import NovaView
from berth.web.pages.object_pages import FilledField
from berth.web.problems import Problem
from berth.web.rendering import TEMPLATES, Section
from berth.web.sign_in_sessions import WebCaller
from bus.contracts.actions import ActionKind, ActionRecord
from bus.contracts.build import BuildRecord, BuildState, HostRecord
from bus.contracts.drains import DrainPlan, DrainProgress
from bus.contracts.objects import ObjectKind, StoredObject
from bus.contracts.operations import ServiceRecord
from bus.contracts.workers import WorkerRecord

WEB = Path(__file__).parents[3] / "berth" / "web"
PAGES_OF = WEB / "pages"
EVERYWHERE = {
    "path": str,
    "who": WebCaller,
    "nav": list[Section],
    "part": Section | None,
    "has_session": bool,
    "unanswered": Problem | None,
    "as_of": float | None,
}
OF_RENDERING = {"asked"}  # what `rendered` takes itself
# {page: {variable: type}}, as `_page` is called in these modules.
MODULES = ("instances.py", "host_pages.py", "object_pages.py", "operator_pages.py", "nova_calls.py", "login.py")
PAGES: dict[str, dict[str, Any]] = {
    "now.html": {
        "now": Now,
        "failures": list[FailureGroup],
        "failures_cut": bool,
        "charts": tuple[Chart, ...],
    },
    "fleet.html": {
        "rows": list[ListedHost],
        "count": int,
        "first": int,
        "earlier": str,
        "later": str,
        "states": dict[str, int],
        "capacity": list[Use],
        "metal": list[MetalClass],
        "unwell": list[ListedHost],
        "unwell_count": int,
        "cells": list[str],
        "zones": list[str],
        "aggregates": list[str],
        "wells": list[str],
        "orders": tuple[str, ...],
        "classes": list[str],
        "metrics": list[str],
        "query": dict[str, str],
    },
    "builds.html": {
        "builds": tuple[BuildRecord, ...],
        "older": float,
        "searched_to": float,
        "states": list[BuildState],
        "query": dict[str, str],
        "caller": WebCaller,
    },
    "build.html": {
        "build": BuildRecord,
        "stages": list[Stage],
        "unplaced": ActionRecord,
        "lost": list[LostClaim],
        "why": Why,
        "actions": tuple[ActionRecord, ...],
        "kinds": list[ActionKind],
        "ended": bool,
        "deletable": bool,
    },
    "login.html": {"wrong": bool, "wanted": str},
    "nova.html": {"calls": NovaView},
    "nova_call.html": {"request_id": str, "calls": NovaView},
    "host.html": {"detail": HostDetail, "host": HostRecord, "row": ListedHost, "changes": list[HostChange]},
    "drain_plan.html": {"host": HostRecord, "plan": DrainPlan, "kind": str, "stuck": int},
    "drain.html": {"drain": DrainProgress},
    "actions.html": {"actions": tuple[ActionRecord, ...], "query": dict[str, str]},
    "operations.html": {
        "breakers": list[BreakerView],
        "quarantined": dict[str, int],
        "never_started": tuple[str, ...],
        "recoveries": list[Recovery],
        "fenced": list[HostRecord],
        "held": list[HostRecord],
        "drains": list[DrainProgress],
        "open_drains": int,
        "actions": tuple[ActionRecord, ...],
        "dead_letters": list[DeadLetterCount],
    },
    "metal.html": {"view": NodesView, "nodes": "NodesView.nodes", "count": int, "chosen": str},
    "objects.html": {
        "revision": int,
        "flavors": list[StoredObject],
        "aggregates": list[StoredObject],
        "groups": list[StoredObject],
        "rules": list[StoredObject],
        "zones": list[Zone],
        "quotas": list[QuotaUse],
    },
    "log.html": {"entries": list[DescribedChange], "older": str, "kinds": list[ObjectKind], "query": dict[str, str]},
    "object.html": {
        "kind": ObjectKind,
        "section": str,
        "name": str,
        "stored": StoredObject,
        "fields": list[FilledField],
        "members": GroupView,
    },
    "system.html": {
        "cells": tuple[CellView, ...],
        "services": list[ServiceRecord],
        "workers": list[WorkerRecord],
    },
    "quarantine.html": {
        "page": QuarantinePage,
        "further": str,
        "breakers": list[BreakerView],
        "query": dict[str, str],
        "decided": bool,
    },
    "letters.html": {"bus": str, "queue": str, "dead_letters": list[DeadLetterView]},
    "dead_letters.html": {"counts": list[DeadLetterCount]},
    "problem.html": {"problem": Problem},
    "unanswered.html": {"title": str},
}
PAGES["metal.html"]["nodes"] = typing.get_type_hints(NodesView)["nodes"]
OF_JINJA = {"loop", "range", "self", "caller"}


class Typing:
    """The types of one template's expressions. wrong: what reads something that is not there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wrong: list[str] = []
        self.macros: set[str] = set()
        self.fields = 0

    def check(self, source: str, variables: Mapping[str, Any]) -> None:
        self._visit(TEMPLATES.parse(source), dict(variables))

    def _visit(self, node: nodes.Node, known: dict[str, Any]) -> None:
        match node:
            case nodes.For():
                inner = {**known, "loop": Any}
                self._bind(node.target, item_of(self._type(node.iter, known)), inner)
                for below in (*([node.test] if node.test else []), *node.body, *node.else_):
                    self._visit(below, inner)
            case nodes.Assign():
                self._bind(node.target, self._type(node.node, known), known)
            case nodes.Macro():
                known[node.name] = Any
                inner = {**known, **{one.name: Any for one in node.args}}
                for below in node.body:
                    self._visit(below, inner)
            case nodes.FromImport():
                made = {one if isinstance(one, str) else one[1]: Any for one in node.names}
                hidden = made.keys() & (known.keys() - self.macros)
                self.wrong += [f"{self.name}:{node.lineno} {one} hides what is passed" for one in sorted(hidden)]
                known |= made
                self.macros |= made.keys()
            case nodes.Include() | nodes.Extends():
                assert isinstance(node.template, nodes.Const)
                self.check(source_of(node.template.value), known)
            case nodes.Expr():
                self._type(node, known)
            case _:
                for below in node.iter_child_nodes():
                    self._visit(below, known)

    def _bind(self, target: nodes.Node, kind: Any, known: dict[str, Any]) -> None:
        if isinstance(target, nodes.Name):
            known[target.name] = kind
            return
        assert isinstance(target, nodes.Tuple)
        parts = typing.get_args(plain(kind))
        if len(parts) != len(target.items) or ... in parts:
            parts = (Any,) * len(target.items)
        for one, part in zip(target.items, parts, strict=True):
            self._bind(one, part, known)

    def _type(self, node: nodes.Node, known: dict[str, Any]) -> Any:
        match node:
            case nodes.Name():
                if node.name not in known and node.name not in OF_JINJA:
                    self.wrong.append(f"{self.name}:{node.lineno} {node.name} is not passed")
                return known.get(node.name, Any)
            case nodes.Getattr():
                return self._field(self._type(node.node, known), node.attr, node.lineno)
            case nodes.Getitem():
                return self._item(node, known)
            case nodes.Filter() if node.node is not None:
                return self._filtered(node, known)
            case nodes.Or():
                found, _ = self._type(node.left, known), self._type(node.right, known)
                return found
            case nodes.CondExpr():
                self._type(node.test, known)
                kinds = [self._type(one, known) for one in (node.expr1, node.expr2) if one is not None]
                return kinds[0]
            case _:
                for below in node.iter_child_nodes():
                    self._visit(below, known)
                is_get = (
                    isinstance(node, nodes.Call) and isinstance(node.node, nodes.Getattr) and node.node.attr == "get"
                )
                return value_of(self._type(node.node.node, known)) if is_get else Any  # type: ignore[attr-defined]

    def _item(self, node: nodes.Getitem, known: dict[str, Any]) -> Any:
        kind = plain(self._type(node.node, known))
        self._visit(node.arg, known)
        if isinstance(node.arg, nodes.Slice):
            return kind
        if typing.get_origin(kind) is dict:
            return value_of(kind)
        parts = typing.get_args(kind)
        if typing.get_origin(kind) is tuple and ... not in parts and isinstance(node.arg, nodes.Const):
            return parts[node.arg.value]
        return item_of(kind)

    def _filtered(self, node: nodes.Filter, known: dict[str, Any]) -> Any:
        assert node.node is not None
        kind = self._type(node.node, known)
        for one in (*node.args, *node.kwargs):
            self._visit(one, known)
        for one in node.kwargs:
            if one.key == "attribute" and isinstance(one.value, nodes.Const) and isinstance(one.value.value, str):
                self._field(item_of(kind), one.value.value, node.lineno)
        match node.name:
            case "dictsort":
                return list[tuple[str, value_of(kind)]]  # type: ignore[misc]
            case "sort" | "list" | "reverse":
                return kind
            case "first" | "last" | "max" | "min":
                return item_of(kind)
        return Any

    def _field(self, kind: Any, name: str, line: int) -> Any:
        kind = plain(kind)
        if kind is Any:
            return Any
        self.fields += 1
        shape = typing.get_origin(kind) or kind
        if shape is dict and not hasattr(dict, name):
            return value_of(kind)  # Jinja reads the item of this name
        if not has(shape, name):
            self.wrong.append(f"{self.name}:{line} {shape.__name__} has no {name}")
            return Any
        if issubclass(shape, enum.Enum):
            return str
        found = typing.get_type_hints(shape).get(name) if typing.get_origin(kind) is None else None
        if found is None and isinstance(read := getattr(shape, name, None), property) and read.fget is not None:
            found = typing.get_type_hints(read.fget).get("return")
        return Any if found is None else found


def has(shape: Any, name: str) -> bool:
    """Whether instances of a class have an attribute."""
    if issubclass(shape, enum.Enum):
        return hasattr(next(iter(shape)), name)
    return hasattr(shape, name) or name in (shape.__init__.__code__.co_names if issubclass(shape, Exception) else ())


def plain(kind: Any) -> Any:
    """A type without Annotated and without None; of several types Any."""
    if typing.get_origin(kind) is Annotated:
        return plain(typing.get_args(kind)[0])
    if typing.get_origin(kind) in (Union, types.UnionType):
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
        return plain(parts[0]) if len(parts) == 1 else Any
    return kind


def item_of(kind: Any) -> Any:
    """The values that a loop over it yields."""
    kind = plain(kind)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(origin, type) and issubclass(origin, Sequence) and parts:
        return parts[0]
    return str if origin is dict or kind is str else Any


def value_of(kind: Any) -> Any:
    """The values of a mapping."""
    parts = typing.get_args(plain(kind))
    return parts[1] if len(parts) == 2 else Any


def source_of(name: str) -> str:
    return (WEB / "templates" / name).read_text()


@pytest.mark.parametrize("name", PAGES)
def test_a_template_reads_only_what_there_is(name: str) -> None:
    found = Typing(name)
    found.check(source_of(name), {**EVERYWHERE, **PAGES[name]})
    assert found.wrong == []
    assert found.fields > (1 if name == "login.html" else 2), "fields are looked at"


def test_what_a_template_reads_and_is_not_there_is_found() -> None:
    source = (
        "{% for one in builds %}{{ one.flavour }}{% for name, held in one.history | dictsort %}{% endfor %}{% endfor %}"
        "{{ builds[0].flavor }}{{ nothing }}{{ (builds | first).status }}{{ caller.role.naem }}"
    )
    found = Typing("x")
    found.check(source, PAGES["builds.html"])
    shadowing = Typing("y")
    shadowing.check('{% from "macros.html" import state %}', {"state": str})
    assert shadowing.wrong == ["y:1 state hides what is passed"]
    assert [line.split(" ", 1)[1] for line in found.wrong] == [
        "BuildRecord has no flavour",
        "nothing is not passed",
        "BuildRecord has no status",
        "WebRole has no naem",
    ]


def test_each_page_is_passed_what_is_declared_here() -> None:
    passed: dict[str, set[str]] = {"problem.html": {"problem"}, "unanswered.html": {"title"}}
    for path in (PAGES_OF / name for name in MODULES):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(attr="_page"), args=[_, ast.Constant(value=str(name)), *_]):
                    names = {one.arg for one in node.keywords if one.arg is not None}
                    passed[name] = names - OF_RENDERING if len(names) == len(node.keywords) else set(PAGES[name])
    assert passed == {name: set(variables) for name, variables in PAGES.items()}
    of_templates = {path.name for path in (WEB / "templates").glob("*.html")}
    assert of_templates - PAGES.keys() == {"base.html", "macros.html", "actions_table.html", "dead_letters_table.html"}


def test_what_a_page_destroys_it_asks_about() -> None:
    """A change of an object is shown before it can be made."""
    pages = {path.name: path.read_text() for path in (WEB / "templates").glob("*.html")}
    buttons = [(name, one) for name, text in pages.items() for one in re.findall(r"<button[^>]*danger[^>]*>", text)]
    assert len(buttons) > 5
    assert [one for one in buttons if "data-confirm" not in one[1] and "disabled" not in one[1]] == []
