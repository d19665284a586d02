"""Which struct an expression is of, read from annotations: type checkers do not look at the keywords of `replace`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.kit.sources import OURS, ROOT, TESTING, nodes, parsed, sources

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Of these a name is taken out of its brackets: `Sequence[X]` is many, `Awaitable[X]` and `X | None` are one.
MANY = {"Sequence", "Iterable", "Iterator", "list", "tuple", "set", "frozenset", "Collection", "AsyncIterator"}
VALUES = {"Mapping", "dict", "MutableMapping"}
ONE = {"Annotated", "Awaitable", "Optional", "Final", "ClassVar", "type"}


class Class(NamedTuple):
    """A class of ours: its module and name."""

    module: str
    name: str


class Type(NamedTuple):
    """What an expression may be: one of these, or (`many`) a collection of them."""

    classes: frozenset[Class]
    many: bool = False


class Call(NamedTuple):
    """A call of `replace`: where, the type of its argument (None: not known), and its keywords."""

    path: Path
    line: int
    of: Type | None
    keywords: tuple[str, ...]


def module_of(path: Path) -> str:
    """The dotted name of a file of the repository."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def _paths() -> dict[str, Path]:
    return {module_of(path): path for path in sources(*OURS, *TESTING)}


@cache
def imported_names(module: str) -> dict[str, tuple[str, str]]:
    """What the names of a module stand for: (module, name), the name empty where it is a module itself."""
    path = _paths()[module]
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    found: dict[str, tuple[str, str]] = {}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                found[alias.asname or alias.name] = (whole, "") if whole in _paths() else (base, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = (alias.name if alias.asname else "", "")
    for name in definitions(module):
        found[name] = (module, name)
    return found


@cache
def definitions(module: str) -> dict[str, ast.AST]:
    """What a module defines at its top level, by name; nothing of a module that is not ours."""
    path = _paths().get(module)
    if path is None:
        return {}
    found: dict[str, ast.AST] = {}
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def _symbol(module: str, name: str) -> tuple[str, str, ast.AST] | None:
    """The definition that a name of a module stands for, through imports."""
    for _ in range(8):
        if (node := definitions(module).get(name)) is not None:
            return module, name, node
        if module not in _paths() or name not in imported_names(module):
            return None
        module, name = imported_names(module)[name]
        if not name:
            return None
    return None


@cache
def _class(found: Class) -> ast.ClassDef | None:
    symbol = _symbol(*found)
    return symbol[2] if symbol is not None and isinstance(symbol[2], ast.ClassDef) else None


@cache
def bases(found: Class) -> frozenset[Class]:
    """It and all of ours that it is derived from."""
    node = _class(found)
    if node is None:
        return frozenset({found})
    above = (_of_annotation(found.module, base) for base in node.bases)
    return frozenset({found}).union(*(bases(one) for kind in above if kind for one in kind.classes if one != found))


@cache
def _derived() -> dict[Class, set[Class]]:
    found: dict[Class, set[Class]] = {}
    for module in _paths():
        for name, node in definitions(module).items():
            if isinstance(node, ast.ClassDef):
                for base in bases(Class(module, name)):
                    found.setdefault(base, set()).add(Class(module, name))
    return found


@cache
def fields(found: Class) -> dict[str, tuple[str, ast.expr]]:
    """The annotated fields of a class and of its bases: the module and the annotation of each."""
    result: dict[str, tuple[str, ast.expr]] = {}
    for base in bases(found):
        node = _class(base)
        for one in node.body if node is not None else ():
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                result[one.target.id] = (base.module, one.annotation)
    return result


def may_have(kind: Type, field: str) -> bool:
    """Whether one of these classes, or one derived from them (what was narrowed), has the field."""
    return any(field in fields(derived) for one in kind.classes for derived in _derived().get(one, {one}))


def _of_annotation(module: str, node: ast.expr | None) -> Type | None:
    match node:
        case ast.Constant(value=str() as text):
            return _of_annotation(module, ast.parse(text, mode="eval").body)
        case ast.Name(id=name):
            symbol = _symbol(module, name)
            if symbol is None:
                return None
            if isinstance(symbol[2], ast.ClassDef):
                return Type(frozenset({Class(symbol[0], symbol[1])}))
            if isinstance(symbol[2], ast.expr):  # an alias
                return _of_annotation(symbol[0], symbol[2])
        case ast.Attribute(value=ast.Name(id=owner), attr=name):
            target = imported_names(module).get(owner)
            return _of_annotation(target[0], ast.Name(id=name)) if target and not target[1] else None
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            sides = [side for side in (left, right) if not (isinstance(side, ast.Constant) and side.value is None)]
            kinds = [_of_annotation(module, side) for side in sides]
            if all(kinds) and len({one.many for one in kinds if one}) == 1:
                return Type(frozenset().union(*(one.classes for one in kinds if one)), kinds[0].many)  # type: ignore[union-attr]
        case ast.Subscript(value=ast.Name(id=name), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            if name in MANY | VALUES:
                kind = _of_annotation(module, parts[-1 if name in VALUES else 0])
                return Type(kind.classes, many=True) if kind is not None and not kind.many else None
            if name in ONE:
                return _of_annotation(module, parts[0])
    return None


class _Scope:
    """The names of one function (and of those it stands in), and of the object whose method it is."""

    def __init__(self, module: str, functions: tuple[Function, ...], owner: Class | None) -> None:
        self.module = module
        self.owner = owner
        self.known: dict[str, list[Type | None]] = {}
        self._busy: set[int] = set()
        for function in functions:
            self._read(function)

    def _read(self, function: Function) -> None:
        arguments = function.args
        for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            self.known.setdefault(one.arg, []).append(_of_annotation(self.module, one.annotation))
        if self.owner is not None and arguments.args:
            self.known[arguments.args[0].arg] = [Type(frozenset({self.owner}))]
        for node in ast.walk(function):
            for name, kind in self._bound_by(node):
                self.known.setdefault(name, []).append(kind)

    def _bound_by(self, node: ast.AST) -> Iterator[tuple[str, Type | None]]:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                yield name, _of_annotation(self.module, annotation)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from self._bound(target, value)
            case ast.NamedExpr(target=ast.Name(id=name), value=value):
                yield name, self.of(value)
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                yield from self._loop(node.target, node.iter)
            case ast.MatchAs(pattern=ast.MatchClass(cls=named), name=str() as name):
                yield name, _of_annotation(self.module, named)
            case ast.withitem(optional_vars=ast.Name(id=name)) | ast.MatchAs(name=str() as name):
                yield name, None
            case ast.MatchStar(name=str() as name):
                yield name, None

    def _bound(self, target: ast.expr, value: ast.expr) -> Iterator[tuple[str, Type | None]]:
        if isinstance(target, ast.Name):
            yield target.id, self.of(value)
        elif isinstance(target, ast.Tuple | ast.List):
            several = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            for at, one in enumerate(target.elts):
                for name in ast.walk(one):
                    if isinstance(name, ast.Name):
                        fits = len(several) == len(target.elts) and isinstance(one, ast.Name)
                        yield name.id, self.of(several[at]) if fits else None

    def _loop(self, target: ast.expr, several: ast.expr) -> Iterator[tuple[str, Type | None]]:
        kind = self.of(several)
        for name in ast.walk(target):
            if isinstance(name, ast.Name):
                one = Type(kind.classes) if kind is not None and kind.many and isinstance(target, ast.Name) else None
                yield name.id, one

    def of(self, node: ast.expr) -> Type | None:
        """The type of an expression, where annotations tell it."""
        if id(node) in self._busy:
            return None
        self._busy.add(id(node))
        try:
            return self._of(node)
        finally:
            self._busy.discard(id(node))

    def _of(self, node: ast.expr) -> Type | None:
        match node:
            case ast.Name(id=name) if name in self.known:
                kinds = self.known[name]
                if any(kind is None for kind in kinds) or len({kind.many for kind in kinds if kind}) > 1:
                    return None
                return Type(frozenset().union(*(kind.classes for kind in kinds if kind)), kinds[0].many)  # type: ignore[union-attr]
            case ast.Name(id=name):
                symbol = _symbol(self.module, name)
                if symbol is not None and isinstance(symbol[2], ast.expr):
                    return _Scope(symbol[0], (), None).of(symbol[2])
                if symbol is not None and isinstance(symbol[2], ast.AnnAssign):
                    return _of_annotation(symbol[0], symbol[2].annotation)
            case ast.Attribute(value=value, attr=name):
                return self._member(self.of(value), name)
            case ast.Await(value=value):
                return self.of(value)
            case ast.Subscript(value=value):
                kind = self.of(value)
                return Type(kind.classes) if kind is not None and kind.many else None
            case ast.IfExp(body=first, orelse=second) | ast.BoolOp(values=[first, second]):
                one, other = self.of(first), self.of(second)
                return Type(one.classes | other.classes, one.many) if one and other and one.many == other.many else None
            case ast.Call(func=function, args=arguments):
                return self._called(function, arguments)
        return None

    def _member(self, kind: Type | None, name: str) -> Type | None:
        if kind is None or kind.many:
            return None
        found = [fields(one)[name] for one in kind.classes if name in fields(one)]
        return _of_annotation(*found[0]) if len(found) == 1 else None

    def _called(self, function: ast.expr, arguments: list[ast.expr]) -> Type | None:
        match function:
            case ast.Name(id="replace" | "changed") if arguments:
                return self.of(arguments[0])
            case ast.Name(id=name) if name not in self.known and (symbol := _symbol(self.module, name)):
                return self._result(*symbol)
            case ast.Attribute(value=ast.Name(id=owner), attr=name) if owner not in self.known:
                target = imported_names(self.module).get(owner)
                if target is not None and not target[1] and (symbol := _symbol(target[0], name)):
                    return self._result(*symbol)
            case ast.Attribute(value=value, attr=name):
                kind = self.of(value)
                if kind is not None and not kind.many and len(kind.classes) == 1:
                    for base in bases(next(iter(kind.classes))):
                        node = _class(base)
                        for one in node.body if node is not None else ():
                            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name == name:
                                return _of_annotation(base.module, one.returns)
        return None

    @staticmethod
    def _result(module: str, name: str, node: ast.AST) -> Type | None:
        if isinstance(node, ast.ClassDef):
            return Type(frozenset({Class(module, name)}))
        return _of_annotation(module, node.returns) if isinstance(node, Function) else None


def replaces(path: Path) -> Iterator[Call]:
    """The calls of `msgspec.structs.replace` in a file, each with the type of what is replaced."""
    module = module_of(path)
    names = {name for name, target in imported_names(module).items() if target == ("msgspec.structs", "replace")}

    scopes: dict[tuple[Function, ...], _Scope] = {}

    def scope_of(functions: tuple[Function, ...], owner: Class | None) -> _Scope:
        if functions not in scopes:
            scopes[functions] = _Scope(module, functions, owner)
        return scopes[functions]

    def walk(node: ast.AST, functions: tuple[Function, ...], owner: Class | None) -> Iterator[Call]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, (), Class(module, child.name))
            elif isinstance(child, Function):
                yield from walk(child, (*functions, child), owner)
            else:
                if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id in names:
                    keywords = tuple(keyword.arg for keyword in child.keywords if keyword.arg)
                    of = scope_of(functions, owner).of(child.args[0]) if child.args and keywords else None
                    yield Call(path, child.lineno, of, keywords)
                yield from walk(child, functions, owner)

    yield from walk(parsed(path), (), None) if names else ()


@cache
def every_field() -> frozenset[str]:
    """The names of the fields of all classes of ours."""
    return frozenset(name for one in _derived() for name in fields(one))
