"""Names that no type checker looks at: keywords of `replace`, attributes that a test patches, names in docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from berth.config.settings import Settings
from tests.kit import sources as kit
from tests.kit.sources import OURS, ROOT, TESTING, nodes, sources, where
from tests.kit.struct_types import every_field, may_have, module_of, replaces

# The share of the keywords whose struct an annotation has to tell.
LEAST_TOLD = 0.75


@pytest.fixture(autouse=True, scope="module")
def trees() -> Iterator[None]:
    """The syntax trees of all tests are large: they are let go of."""
    yield
    kit.forget()


def test_a_replace_names_fields_of_its_struct() -> None:
    wrong: list[str] = []
    told, all_of = 0, 0
    for path in sources(*OURS, *TESTING):
        for call in replaces(path):
            all_of += len(call.keywords)
            told += len(call.keywords) if call.of is not None else 0
            wrong += [
                f"{where(path, call.line)} {field}"
                for field in call.keywords
                if field not in every_field() or (call.of is not None and not may_have(call.of, field))
            ]
    assert wrong == []
    assert told > LEAST_TOLD * all_of


def test_what_a_test_patches_is_there() -> None:
    """A patch that is not reached in a run is not seen to miss its target, nor is one with `raising=False`."""
    wrong: list[str] = []
    found = 0
    for path in sources(*TESTING):
        for node in nodes(path):
            if isinstance(node, ast.Call) and re.search(r"(?:^|\.)(?:setattr|patch|object)$", ast.unparse(node.func)):
                for target, name in _patched(path, node):
                    found += 1
                    if not hasattr(target, name):
                        wrong.append(f"{where(path, node.lineno)} {ast.unparse(node.args[0])} {name}")
    assert wrong == []
    assert found > 300


def _patched(path: Path, call: ast.Call) -> Iterator[tuple[Any, str]]:
    """What a call patches, and the name of the attribute, where both stand in the call: none of a local variable."""
    match call.args:
        case [ast.Constant(value=str() as dotted), *_] if dotted.partition(".")[0] in (*OURS, *TESTING):
            owner, _, name = dotted.rpartition(".")
            yield _imported(owner), name
        case [ast.Name() | ast.Attribute() as target, ast.Constant(value=str() as name), *_]:
            parts = ast.unparse(target).split(".")
            known = {} if "(" in ast.unparse(target) else _imports(path)
            if parts[0] in known:
                owner = known[parts[0]]
                for part in parts[1:]:
                    owner = getattr(owner, part)
                yield owner, name


def _imported(dotted: str) -> Any:
    """The module or class of this name."""
    try:
        return import_module(dotted)
    except ModuleNotFoundError:
        module, _, name = dotted.rpartition(".")
        return getattr(import_module(module), name)


def _imports(path: Path) -> dict[str, Any]:
    """The modules and classes of ours that a file imports at its top level, by the name that they have in it."""
    found: dict[str, Any] = {}
    for node in kit.parsed(path).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            for alias in node.names:
                found[alias.asname or alias.name] = _imported(f"{node.module}.{alias.name}")
    return found


# Names of others that begin like a module of ours.
FOREIGN = {"nova.exception"}


def test_a_name_in_a_docstring_is_one_of_ours() -> None:
    """`module.name` in backticks whose first part is a module of ours: something in it, a code, or a setting."""
    modules = {module_of(path) for path in sources(*OURS, *TESTING)}
    stems = {one.rpartition(".")[2] for one in modules}
    known = {".".join(one.split(".")[-2:]) for one in modules}
    for path in sources(*OURS, *TESTING):
        stem = module_of(path).rpartition(".")[2]
        for node in nodes(path):
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    known.add(f"{stem}.{name}")
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    known.add(f"{stem}.{name}")
    known |= {name for page in ("codes", "settings", "messages") for name in _dotted_in(page)}
    known |= {*_settings(Settings), *FOREIGN}
    wrong = [
        f"{where(path, getattr(node, 'lineno', 1))} {name}"
        for path in sources(*OURS)
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for name in re.findall(r"(?<!`)`([a-z_]+\.[A-Za-z_]+)`(?!`)", ast.get_docstring(node) or "")
        if name.partition(".")[0] in stems and name not in known and not name.endswith((".py", ".toml", ".json"))
    ]
    assert wrong == []


# What docstrings name that is not ours: other programs, formats, an example of a mistyped field, a pattern.
NO_NAMES_OF_OURS = {
    *("messagingv2", "serialize_remote_exception", "ExportTraceServiceRequest", "ipmi", "redfish"),
    *("enospc", "ra_log_wal", "sd_notify", "hostt", "prefix_key"),
}
FILES_OF_OTHERS = ("nova/", "_drivers/")


def test_a_name_in_a_docstring_exists() -> None:
    """`name` in backticks is in the product's code as a name or a text, or an SQL function; `file.py` is a file."""
    files = [f"/{path.relative_to(ROOT)}" for path in sources(*OURS, *TESTING)]
    known = {part for file in files for part in file.removesuffix(".py").split("/")}
    for path in sources(*OURS):
        known.update(name for node in nodes(path) for name in _words_of(node))
    for path in (path for package in OURS for path in (ROOT / package).rglob("*.sql")):
        known.update(re.findall(r"(?i)\bfunction (\w+)", path.read_text()))
    unknown = [
        (name, where(path, getattr(node, "lineno", 1)))
        for path in sources(*OURS)
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for name in re.findall(r"(?<!`)`([A-Za-z_]\w*|[\w/]+\.py)`(?!`)", ast.get_docstring(node) or "")
        if name not in known
        and not name.startswith(FILES_OF_OTHERS)
        and not (name.endswith(".py") and any(file.endswith(f"/{name}") for file in files))
    ]
    assert [one for one in unknown if one[0] not in NO_NAMES_OF_OURS] == []
    assert NO_NAMES_OF_OURS - {name for name, _ in unknown} == set(), "no docstring names these any more"


def _words_of(node: ast.AST) -> Iterator[str]:
    """The names that a node has, and a text of one word."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
            yield name
        case ast.Constant(value=str(text)) if text.isidentifier():
            yield text


def _dotted_in(page: str) -> list[str]:
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
    return [f"{first}.{second}" for first, second in re.findall(r"\b([a-z_]+)\.(?=([a-z_]+)\b)", text)]


def _settings(section: type) -> Iterator[str]:
    """`section.name` of each setting."""
    for field in msgspec.structs.fields(section):
        kind = next((one for one in (field.type, *get_args(field.type)) if _is_struct(one)), None)
        if kind is not None:
            yield from (f"{field.name}.{one.name}" for one in msgspec.structs.fields(kind))
            yield from _settings(kind)


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


# --- Words of the old private language, which the field has better ones for: {word: what is written instead}. Its forms
# with -s, -es, -ed and -ing are meant, too. Only words that no identifier of the product has are in the table.
WORDS = {
    "anothers": "foreign",
    "author": "actor",
    "barred": "blocked",
    "beat": "heartbeat",
    "book": "placement, replica",
    "brief": "summary",
    "certain": "verified",
    "clash": "conflict",
    "contested": "conflict",
    "depart": "transfer",
    "departure": "transfer",
    "desire": "desired state",
    "doubt": "unverified",
    "entrance": "intake",
    "era": "restore epoch",
    "flaw": "problem",
    "forgetter": "removal",
    "forgotten": "deleted, record lost",
    "giver": "donor",
    "grave": "tombstone",
    "guest": "simulated machine",
    "harm": "impact",
    "harmful": "destructive",
    "heat": "temperature",
    "keeper": "leader, controller",
    "lane": "partition",
    "letter": "dead letter",
    "lift": "unfence",
    "meant": "referenced",
    "misreserved": "wrong reservations",
    "namesake": "duplicate name",
    "narrowing": "filtering",
    "offering": "startup gate",
    "patience": "timeout",
    "placeable": "schedulable",
    "presence": "heartbeat",
    "probation": "canary",
    "raced": "conflict",
    "remark": "warning",
    "renumbered": "reused attempt numbers",
    "sentence": "message",
    "sharer": "sharing provider",
    "spared": "kept",
    "standing": "state",
    "stranded": "orphaned, unlocatable",
    "stretch": "clock pause",
    "sure": "verified",
    "survey": "scan",
    "theirs": "of the one that is named",
    "trouble": "problem",
    "unbuilt": "without machine",
    "undo": "roll back",
    "unexplained": "unknown machine",
    "unproved": "unproven",
    "unsearched": "needs lookup",
    "unsure": "unverified",
    "untried": "not commanded",
    "verdict": "result, decision, action",
    "wish": "target",
    "worth": "priority",
}
# What is right with the word before it: {(word before, word): why}.
RIGHT = {
    ("dead", "letter"): "RabbitMQ's term",
    ("in", "doubt"): "databases call a transaction so whose outcome is not known: so is a claim in `berth audit`",
}


def test_no_identifier_has_a_word_that_went() -> None:
    found = [
        f"{where(path, line)} {name}: {word} is {WORDS[word]}"
        for path in sources(*OURS)
        for name, line in [(path.stem, 1), (path.parent.name, 1), *_defined(nodes(path))]
        for before, word in _old_words(name)
        if (before, word) not in RIGHT
    ]
    assert found == []


def test_what_is_right_with_a_word_before_it_is_there() -> None:
    """An entry of RIGHT that no identifier has any more is taken out."""
    found = {pair for path in sources(*OURS) for name, _ in _defined(nodes(path)) for pair in _old_words(name)}
    assert RIGHT.keys() - found == set()


@pytest.mark.parametrize(
    "planted",
    (
        *("class WishTable: ...", "class BuildVerdicts: ...", "def has_letter(): ...", "async def _undo(): ..."),
        *("def end(instance, lane): ...", "def end(*, book_key=None): ...", "def end(*wishes): ...", "DESIRES = 1"),
        *(
            "class A:\n    era: int = 0",
            "class A:\n    def b(self):\n        self._doubted = 1",
            "for doubt in (): ...",
        ),
        *(
            "import a as keeper",
            "match a:\n    case {'b': verdict}: ...",
            "try: ...\nexcept A as doubt: ...",
            "LETTERS = 1",
        ),
    ),
)
def test_a_word_that_went_is_found(planted: str) -> None:
    names = [name for name, _ in _defined(ast.walk(ast.parse(planted)))]
    assert sum(pair not in RIGHT for name in names for pair in _old_words(name)) == 1


def test_other_words_are_not_found() -> None:
    for name in (
        "DEAD_LETTERS",
        "is_in_doubt",
        "planes",
        "generation",
        "ensure",
        "desired_state",
        "fairly",
        "authorize",
    ):
        assert [pair for pair in _old_words(name) if pair not in RIGHT] == []


def _defined(parts: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """The names that a source gives to something, with their lines."""
    for node in parts:
        match node:
            case (
                ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.arg(arg=name)
            ):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.alias(asname=str() as name) | ast.MatchAs(name=str() as name) | ast.MatchStar(name=str() as name):
                yield name, node.lineno
            case ast.ExceptHandler(name=str() as name) | ast.MatchMapping(rest=str() as name):
                yield name, node.lineno


# Two words that together meant something else than each of them does: {(word, next word): what is written instead}.
PAIRS = {
    ("delivery", "attempt"): "retries",
    ("move", "host"): "host's cell",
    ("placement", "refused"): "host search",
    ("placement", "result"): "host search",
    ("placement", "state"): "host search",
    ("placement", "step"): "host search",
    ("spec", "moves"): "spec changes",
}
# Where no host is fenced: there attempts end.
WITHOUT_FENCES = ("compute_agent", "ironic_sync", "placement_worker")


def test_no_identifier_has_a_word_in_another_meaning() -> None:
    found = [
        f"{where(path, line)} {name}: {PAIRS[pair]}"
        for path in sources(*OURS)
        for name, line in [(path.stem, 1), *_defined(nodes(path))]
        for pair in pairwise(word.lower() for word in _WORD.findall(name))
        if pair in PAIRS
    ]
    found += [
        f"{where(path, line)} {name}: ended attempt"
        for path in sources(*WITHOUT_FENCES)
        for name, line in _defined(nodes(path))
        if "fence" in name.replace("fenced_hosts", "")
    ]
    assert found == []


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_FORM = re.compile(rf"({'|'.join(WORDS)})(?:s|es|ed|ing)?")


def _old_words(name: str) -> Iterator[tuple[str, str]]:
    """Each word of a name that is a form of one of WORDS, after the word before it."""
    words = ["", *(word.lower() for word in _WORD.findall(name))]
    for before, word in pairwise(words):
        if found := _FORM.fullmatch(word):
            yield before, found[1]
