"""The checks of the house rules on a syntax tree: growing waits, slots, exceptions, docstrings, numbers and fields."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

WAITS = re.compile("sleep|wait|within")
# A broken contract of the caller's, or of Python's own.
CALLERS_FAULTS = {"AssertionError", "NotImplementedError", "StopAsyncIteration"}
# CONTRIBUTING.md: a duration or a monotonic time ends in `_s`, a time of the calendar in `_at`, `_before` or `_since`.
UNIT = re.compile(r".*_(s|ms|at|before|since|mb|gb|bytes|share|ratio)|now|at|before|seconds")
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def waits_longer(function: ast.AST) -> bool:
    """Whether one of its loops waits, and doubles something."""
    return any(
        doubles(loop) and any(isinstance(call, ast.Attribute) and WAITS.search(call.attr) for call in ast.walk(loop))
        for loop in ast.walk(function)
        if isinstance(loop, ast.While | ast.For | ast.AsyncFor)
    )


def doubles(loop: ast.AST) -> bool:
    """Whether it multiplies a variable by two, or raises two to a power. Twice a constant is a wait like any other."""
    for node in ast.walk(loop):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            sides = (node.left, node.right)
            if any(map(is_two, sides)) and not any(isinstance(one, ast.Name) and one.id.isupper() for one in sides):
                return True
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow) and is_two(node.left):
            return True
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult | ast.Pow) and is_two(node.value):
            return True
    return False


def is_two(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == 2


def members_listed(statement: ast.stmt, enumeration: str) -> set[str]:
    """The members of an enumeration that stand in one expression of a statement, where there are several."""
    for expression in ast.iter_child_nodes(statement):
        found = {
            node.attr
            for node in ast.walk(expression)
            if isinstance(expression, ast.expr)
            and isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == enumeration
        }
        if len(found) > 1:
            return found
    return set()


def slots_of(node: ast.ClassDef) -> list[str]:
    """The names of a class's `__slots__`; none when some of them do not stand there as texts."""
    for one in node.body:
        match one:
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=elts)):
                names = [elt.value for elt in elts if isinstance(elt, ast.Constant) and isinstance(elt.value, str)]
                return names if len(names) == len(elts) else []
    return []


def is_stored(node: ast.Attribute) -> bool:
    return isinstance(node.ctx, ast.Store)


def is_own(node: ast.Attribute) -> bool:
    return is_stored(node) and isinstance(node.value, ast.Name) and node.value.id == "self"


def is_broad(kind: ast.expr | None) -> bool:
    return kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"})


def silent_raises(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Public functions and methods that raise an exception which their docstring does not name: (name, line, which)."""
    for name, node in public_definitions(tree):
        if isinstance(node, ast.ClassDef):
            continue
        text = ast.get_docstring(node) or ""
        raised = {kind for one in own_statements(node) if (kind := raised_by(one)) and kind not in CALLERS_FAULTS}
        if raised and "aise" not in text and not any(kind in text for kind in raised):
            yield name, node.lineno, ", ".join(sorted(raised))


def own_statements(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function's body, without those of functions and classes inside it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, Definition | ast.Lambda):
            yield node
            yield from own_statements(node)


def raised_by(node: ast.AST) -> str:
    """The class that a statement raises; "": none, or the exception that is handled."""
    if not isinstance(node, ast.Raise) or node.exc is None:
        return ""
    kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    name = kind.id if isinstance(kind, ast.Name) else kind.attr if isinstance(kind, ast.Attribute) else ""
    return name if name[:1].isupper() else ""


def numbers_without_unit(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Parameters of public functions that are floats, with no unit in the name and none in a docstring."""
    classes = {name: ast.get_docstring(node) or "" for name, node in public_definitions(tree)}
    for name, node in public_definitions(tree):
        if isinstance(node, ast.ClassDef):
            continue
        text = classes[name] + classes.get(name.partition(".")[0], "")
        for argument in (*node.args.args, *node.args.kwonlyargs):
            kind = ast.unparse(argument.annotation) if argument.annotation else ""
            is_bare = kind in {"float", "float | None"} and not UNIT.fullmatch(argument.arg)
            if is_bare and not re.search(rf"\b{argument.arg}\b", text):
                yield name, node.lineno, argument.arg


def names_in(definition: ast.AST) -> Iterator[str]:
    """Every name that a class uses, as a field, an argument, an attribute or a text."""
    for node in ast.walk(definition):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)) | ast.AsyncFunctionDef(name=name):
                yield name


def public_definitions(tree: ast.Module) -> Iterator[tuple[str, Definition]]:
    for node in tree.body:
        if isinstance(node, Definition) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                inner = (one for one in node.body if isinstance(one, Definition) and not one.name.startswith("_"))
                yield from ((f"{node.name}.{one.name}", one) for one in inner)
