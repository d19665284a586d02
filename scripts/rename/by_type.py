"""Rename identifiers of the code by what they are, not by how they are spelled: `by_type.py ROWS [--apply]`.

ROWS: a TSV of old and new names. old: `name` (each class, function, constant and member that is defined under it in our
packages), `Class.member`, or `package.module.name`. Mypy resolves each use: attributes, keywords of constructors and of
`msgspec.structs.replace`, of class patterns, names in `patch.object(x, "name")`, imports. Prints what it could not
resolve, and which definitions each row has found. A row that finds none, or whose new name is there already, fails.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from mypy import build, nodes, patterns, types
from mypy.main import process_options

PACKAGES = (
    "bus", "placement_worker", "scheduler_worker", "cell_conductor", "compute_sim", "ironic_sync", "gateway", "berth",
    "lab", "tests",
)  # fmt: skip
NAMED_BY = {"object", "setattr", "getattr", "delattr", "hasattr"}  # their second argument names an attribute


def tree_of() -> build.BuildResult:
    """Product, lab and tests, with the type of each expression."""
    words = ["--no-incremental", "--cache-dir=/dev/null", "--allow-redefinition", "--check-untyped-defs"]
    for package in PACKAGES:
        words += ["-p", package]
    sources, options = process_options(words)
    options.export_types = options.preserve_asts = True
    options.packages = None
    return build.build(sources, options)


class Row:
    """One rename. found: the full names that it is about."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new
        self.found: set[str] = set()

    @property
    def name(self) -> str:
        return self.old.rpartition(".")[2]


def definitions(files: Iterable[nodes.MypyFile]) -> Iterator[str]:
    """The full names of what is defined in these modules, members included."""

    def of(prefix: str, table: nodes.SymbolTable, depth: int) -> Iterator[str]:
        for name, symbol in table.items():
            node = symbol.node
            fullname = f"{prefix}.{name}"
            if node is None or (depth == 0 and node.fullname != fullname):
                continue  # imported
            if isinstance(node, nodes.MypyFile):
                continue
            yield fullname
            if isinstance(node, nodes.TypeInfo) and node.fullname == fullname:
                yield from of(fullname, node.names, depth + 1)

    for file in files:
        yield from of(file.fullname, file.names, 0)


def targets(rows: Iterable[Row], defined: Iterable[str]) -> dict[str, str]:
    """{full name: its new last part}."""
    by_tail: dict[str, list[str]] = defaultdict(list)
    for fullname in defined:
        parts = fullname.split(".")
        for count in range(1, len(parts) + 1):
            by_tail[".".join(parts[-count:])].append(fullname)
    made: dict[str, str] = {}
    for row in rows:
        row.found = set(by_tail.get(row.old, ()))
        for fullname in row.found:
            if made.setdefault(fullname, row.new) != row.new:
                raise SystemExit(f"two rows rename {fullname}")
    return made


class Source:
    """The text of one file, and where its tokens are."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text()
        self.lines = self.text.splitlines(keepends=True)
        self.tokens = {
            (token.start[0], token.start[1]): token
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline)
        }
        self.order = sorted(self.tokens)
        self.tree = ast.parse(self.text)
        self.calls = {
            (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset): node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Call)
        }
        self.edits: dict[tuple[int, int], tuple[str, str]] = {}

    def column(self, line: int, byte: int) -> int:
        """In characters; syntax trees count bytes."""
        return len(self.lines[line - 1].encode()[:byte].decode(errors="ignore"))

    def edit(self, line: int, column: int, old: str, new: str) -> bool:
        """Note one; False: there is another name at this place."""
        if not self.lines[line - 1][column:].startswith(old):
            return False
        self.edits[line, column] = (old, new)
        return True

    def applied(self) -> str:
        lines = list(self.lines)
        for (line, column), (old, new) in sorted(self.edits.items(), reverse=True):
            text = lines[line - 1]
            lines[line - 1] = text[:column] + new + text[column + len(old) :]
        return "".join(lines)


# Attributes of nodes that lead to what is defined elsewhere.
REFERENCES = {
    "node", "info", "type", "unanalyzed_type", "analyzed", "original_def", "unanalyzed_items", "variable", "mro"
}  # fmt: skip


def children(of: nodes.Node) -> Iterator[nodes.Node]:
    """The parts of a node. Mypy's own traversal is compiled, and cannot be inherited from."""
    for kind in type(of).__mro__:
        for name, attribute in vars(kind).items():
            if name.startswith("_") or name in REFERENCES or not hasattr(attribute, "__set__"):
                continue
            try:
                value = getattr(of, name)
            except AttributeError:
                continue
            yield from _nodes_in(value)


def _nodes_in(value: object) -> Iterator[nodes.Node]:
    if (isinstance(value, nodes.Node) and not isinstance(value, nodes.SymbolNode)) or isinstance(
        value, nodes.FuncDef | nodes.Decorator | nodes.OverloadedFuncDef
    ):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _nodes_in(one)


class Uses:
    """Finds the uses in one file."""

    def __init__(
        self, file: nodes.MypyFile, source: Source, known: dict[nodes.Expression, types.Type], wanted: dict[str, str]
    ) -> None:
        self.seen: set[int] = set()
        self.file, self.source, self.known, self.wanted = file, source, known, wanted
        self.members = {name.rpartition(".")[2] for name in wanted}
        self.classes: list[nodes.ClassDef] = []
        self.unresolved: list[str] = []

    def note(self, line: int, what: str) -> None:
        self.unresolved.append(f"{self.source.path}:{line}: {what}")

    # --- what things are

    def infos(self, kind: types.Type | None) -> Iterator[nodes.TypeInfo]:
        """The classes whose members an expression of this type has."""
        if kind is None:
            return
        kind = types.get_proper_type(kind)
        if isinstance(kind, types.Instance):
            yield kind.type
        elif isinstance(kind, types.UnionType):
            for one in kind.items:
                yield from self.infos(one)
        elif isinstance(kind, types.TypeType):
            yield from self.infos(kind.item)
        elif isinstance(kind, types.CallableType | types.Overloaded) and kind.is_type_obj():
            yield kind.type_object()
        elif isinstance(kind, types.TypeVarType):
            yield from self.infos(kind.upper_bound)
        elif isinstance(kind, types.TupleType):
            yield kind.partial_fallback.type
        elif isinstance(kind, types.LiteralType):
            yield kind.fallback.type

    def member(self, infos: Iterable[nodes.TypeInfo], name: str) -> str | None:
        """The full name of the member that these classes have under this name."""
        for info in infos:
            for base in info.mro:
                if name in base.names:
                    return f"{base.fullname}.{name}"
        return None

    def rename(self, fullname: str | None, line: int, column: int, old: str) -> None:
        new = self.wanted.get(fullname or "")
        if new is not None and not self.source.edit(line, column, old, new):
            self.note(line, f"{fullname} is not where it should be")

    def named(self, node: nodes.Node, name: str, keyword: str, fullname: str) -> None:
        """The name in a `def` or `class`."""
        if fullname not in self.wanted:
            return
        for line in range(node.line, min(node.line + 25, len(self.source.lines) + 1)):
            if match := re.search(rf"\b{keyword}\s+({name})\b", self.source.lines[line - 1]):
                self.rename(fullname, line, match.start(1), name)
                return
        self.note(node.line, f"no {keyword} of {name}")

    # --- nodes

    def visit(self, o: nodes.Node) -> None:
        """The node and all below it, once."""
        if id(o) in self.seen:
            return
        self.seen.add(id(o))
        if isinstance(o, nodes.ClassDef):
            self.visit_class_def(o)
            return
        if isinstance(o, nodes.FuncDef):
            self.visit_func_def(o)
            return
        if isinstance(o, nodes.NameExpr):
            self.visit_name_expr(o)
        elif isinstance(o, nodes.MemberExpr):
            self.visit_member_expr(o)
        elif isinstance(o, nodes.CallExpr):
            self.visit_call_expr(o)
        elif isinstance(o, patterns.ClassPattern):
            self.visit_class_pattern(o)
        self.visit_children(o)

    def visit_children(self, o: nodes.Node) -> None:
        for one in children(o):
            self.visit(one)

    def visit_class_def(self, o: nodes.ClassDef) -> None:
        self.named(o, o.name, "class", o.fullname)
        self.classes.append(o)
        self.visit_children(o)
        self.classes.pop()

    def visit_func_def(self, o: nodes.FuncDef) -> None:
        fullname = f"{o.info.fullname}.{o.name}" if o.info else o.fullname
        self.named(o, o.name, "def", fullname)
        classes, self.classes = self.classes, []
        self.visit_children(o)
        self.classes = classes

    def visit_name_expr(self, o: nodes.NameExpr) -> None:
        fullname = o.fullname
        if self.classes and o.kind == nodes.MDEF:
            fullname = f"{self.classes[-1].fullname}.{o.name}"
        elif o.node is not None and isinstance(o.node, nodes.TypeInfo | nodes.FuncDef | nodes.Var | nodes.TypeAlias):
            fullname = fullname or o.node.fullname
        column = self.source.column(o.line, o.column)
        if fullname in self.wanted and self.source.lines[o.line - 1][column:].startswith(o.name):
            self.rename(fullname, o.line, column, o.name)

    def visit_member_expr(self, o: nodes.MemberExpr) -> None:
        if o.name not in self.members or o.end_line is None or o.end_column is None:
            return
        fullname = o.fullname if o.fullname in self.wanted else None
        kind = self.known.get(o.expr)
        fullname = fullname or self.member(self.infos(kind), o.name)
        if fullname is None and isinstance(o.expr, nodes.RefExpr) and isinstance(o.expr.node, nodes.TypeInfo):
            fullname = self.member([o.expr.node], o.name)
        if fullname is None:
            self.note(o.end_line, f".{o.name} of what is not known")
            return
        column = self.source.column(o.end_line, o.end_column) - len(o.name)
        self.rename(fullname, o.end_line, column, o.name)

    def visit_call_expr(self, o: nodes.CallExpr) -> None:
        infos = list(self._keyword_classes(o))
        key = (o.line, o.column, o.end_line, o.end_column)
        call = self.source.calls.get(key)
        for keyword in () if call is None else call.keywords:
            if keyword.arg in self.members:
                fullname = self.member(infos, keyword.arg)
                if fullname is not None:
                    column = self.source.column(keyword.lineno, keyword.col_offset)
                    self.rename(fullname, keyword.lineno, column, keyword.arg)
                elif self._is_replace(o):
                    self.note(keyword.lineno, f"replace(..., {keyword.arg}=) of what is not known")
        name = o.callee.name if isinstance(o.callee, nodes.RefExpr) and hasattr(o.callee, "name") else ""
        if name in NAMED_BY and len(o.args) > 1 and isinstance(o.args[1], nodes.StrExpr):
            self._named_attribute(o.args[0], o.args[1])

    def _is_replace(self, o: nodes.CallExpr) -> bool:
        return isinstance(o.callee, nodes.RefExpr) and o.callee.fullname.endswith((
            "msgspec.structs.replace", "dataclasses.replace", "copy.replace"
        ))  # fmt: skip

    def _keyword_classes(self, o: nodes.CallExpr) -> Iterator[nodes.TypeInfo]:
        if self._is_replace(o):
            yield from self.infos(self.known.get(o.args[0]) if o.args else None)
            return
        callee = o.callee
        if isinstance(callee, nodes.RefExpr) and isinstance(callee.node, nodes.TypeInfo):
            yield callee.node
            return
        kind = self.known.get(callee)
        proper = None if kind is None else types.get_proper_type(kind)
        if isinstance(proper, types.CallableType | types.Overloaded) and proper.is_type_obj():
            yield proper.type_object()

    def _named_attribute(self, of: nodes.Expression, name: nodes.StrExpr) -> None:
        if name.value not in self.members:
            return
        fullname = self.member(self.infos(self.known.get(of)), name.value)
        if fullname is None and isinstance(of, nodes.RefExpr):
            node = of.node
            if isinstance(node, nodes.TypeInfo):
                fullname = self.member([node], name.value)
            elif isinstance(node, nodes.MypyFile) and name.value in node.names:
                found = node.names[name.value].node
                fullname = None if found is None else found.fullname
        if fullname is None:
            self.note(name.line, f'"{name.value}" of what is not known')
        else:
            self.rename(fullname, name.line, self.source.column(name.line, name.column) + 1, name.value)

    def visit_class_pattern(self, o: patterns.ClassPattern) -> None:
        ref = o.class_ref
        info = ref.node if isinstance(ref, nodes.RefExpr) else None
        if not isinstance(info, nodes.TypeInfo):
            return
        for name, value in zip(o.keyword_keys, o.keyword_values, strict=True):
            if name not in self.members:
                continue
            fullname = self.member([info], name)
            before = [at for at in self.source.order if at < (value.line, self.source.column(value.line, value.column))]
            for at in reversed(before):
                if self.source.tokens[at].string == name:
                    self.rename(fullname, *at, name)
                    break


def names(file: nodes.MypyFile, source: Source, wanted: dict[str, str]) -> None:
    """Names of the module, in annotations too, which are no expressions of mypy's."""
    there = {
        name: symbol.node.fullname
        for name, symbol in file.names.items()
        if symbol.node is not None and symbol.node.fullname in wanted
    }

    def look(node: ast.AST, hidden: frozenset[str]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            arguments = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
            stored = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
            hidden |= arguments | stored
        if isinstance(node, ast.Name) and node.id in there and node.id not in hidden:
            column = source.column(node.lineno, node.col_offset)
            source.edit(node.lineno, column, node.id, wanted[there[node.id]])
        for one in ast.iter_child_nodes(node):
            look(one, hidden)

    look(source.tree, frozenset())


def imports(file: nodes.MypyFile, source: Source, wanted: dict[str, str], files: dict[str, nodes.MypyFile]) -> None:
    """The names in `from x import name`, wherever the statement is."""
    package = file.fullname if source.path.name == "__init__.py" else file.fullname.rpartition(".")[0]
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            of = files.get(module)
            symbol = None if of is None else of.names.get(alias.name)
            fullname = symbol.node.fullname if symbol is not None and symbol.node is not None else ""
            if new := wanted.get(fullname):
                source.edit(alias.lineno, source.column(alias.lineno, alias.col_offset), alias.name, new)


def strings(source: Source, members: set[str]) -> Iterator[str]:
    """Texts that are one of the old names, to be looked at: keys of `**other`, columns, names to patch."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in members:
            column = source.column(node.lineno, node.col_offset) + 1
            if (node.lineno, column) not in source.edits:
                yield f'{source.path}:{node.lineno}: text "{node.value}"'


def main(words: list[str]) -> int:
    """Print what is found; with --apply, write it."""
    rows = [
        Row(*line.split("\t")[:2])
        for line in Path(words[0]).read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    result = tree_of()
    files = {
        name: one for name, one in result.files.items() if name.split(".")[0] in PACKAGES and one.path.endswith(".py")
    }
    defined = set(definitions(files.values()))
    wanted = targets(rows, defined)
    failed = False
    for row in rows:
        there = [one for one in row.found if f"{one.rpartition('.')[0]}.{row.new}" in defined]
        failed |= not row.found or bool(there)
        print(f"{row.old} -> {row.new}: {', '.join(sorted(row.found)) or 'NOT DEFINED'}{' IS THERE' if there else ''}")
    edits = 0
    for _, file in sorted(files.items()):
        source = Source(Path(file.path))
        uses = Uses(file, source, result.types, wanted)
        for definition in file.defs:
            uses.visit(definition)
        imports(file, source, wanted, result.files)
        names(file, source, wanted)
        edits += len(source.edits)
        for line in (*uses.unresolved, *strings(source, uses.members)):
            print(line)
        if "--apply" in words and source.edits:
            source.path.write_text(source.applied())
    print(f"{edits} places in {len(files)} files")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
