"""Draws mutants of Python files with mutmut's visitor, and prints each with the source that it makes, as JSON.

Run by the interpreter of mutmut, which knows nothing of berth. Of mutmut's operators those stay that change a
decision: numbers, truth values, negations, comparisons, arithmetic, cases and conditional expressions. An argument, an
assigned value or a lambda that becomes None fails at its first use, and a changed text changes no decision. mutmut
swaps `and` and `or` only, and leaves statements' conditions alone; the operators here drop each operand, and force each
arm. A number that stands outside of functions (a bound with a name, a default) and what a class is declared with
(`frozen=True`) decide nothing.

Every second mutant is one of state (tests/mutation/state.py). A file is drawn by how many places it has that may be
changed, then one of its mutants: only what is drawn is read by mutmut, which takes a second for two files.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators
from mutmut.mutation.file_mutation import Mutation, MutationVisitor, deep_replace
from mutmut.mutation.pragma_handling import IgnoredCode

sys.path.insert(0, str(Path(__file__).parent))  # no package of berth's is there
import state

KEPT = {
    mutators.operator_number,
    mutators.operator_name,
    mutators.operator_remove_unary_ops,
    mutators.operator_keywords,
    mutators.operator_swap_op,
    mutators.operator_match,
    mutators.operator_if_exp,
}


def without_an_operand(node: cst.BooleanOperation) -> Iterator[cst.BaseExpression]:
    """`a and b and c` is `(a and b) and c`: what is dropped is one operand, never two. The parentheses stay: what they
    enclose may have several lines.
    """
    left = [node.left]
    if not (isinstance(node.left, cst.BooleanOperation) and isinstance(node.left.operator, type(node.operator))):
        left.append(node.right)
    for one in left:
        yield one.with_changes(lpar=[*node.lpar, *one.lpar], rpar=[*one.rpar, *node.rpar])


def forced(test: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Always false and always true, evaluated all the same: a walrus in it still names its value."""
    whole = test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    for operator, constant in ((cst.And(), "False"), (cst.Or(), "True")):
        yield cst.BooleanOperation(left=whole, operator=operator, right=cst.Name(constant))


def forced_statement(node: cst.If) -> Iterator[cst.If]:
    """Each arm of a statement."""
    for test in forced(node.test):
        yield node.with_changes(test=test)


def forced_comprehension(node: cst.CompIf) -> Iterator[cst.CompIf]:
    """Each arm of a comprehension's condition."""
    for test in forced(node.test):
        yield node.with_changes(test=test)


def forced_guard(node: cst.MatchCase) -> Iterator[cst.MatchCase]:
    """Each arm of a case's guard."""
    if node.guard is not None:
        for test in forced(node.guard):
            yield node.with_changes(guard=test)


def without_an_alternative(node: cst.MatchOr) -> Iterator[cst.MatchPattern]:
    """`case A() | B()` without either."""
    for at in range(len(node.patterns)):
        left = [*node.patterns[:at], *node.patterns[at + 1 :]]
        if len(left) == 1:
            yield left[0].pattern
        else:
            left[-1] = left[-1].with_changes(separator=cst.MaybeSentinel.DEFAULT)
            yield node.with_changes(patterns=left)


# What an operator changes, by Python's own names: how likely a file is to be drawn.
RULES = (ast.If, ast.IfExp, ast.BoolOp, ast.Compare, ast.BinOp, ast.UnaryOp, ast.comprehension, ast.match_case)
STATES = (ast.AugAssign, ast.Await)

OPERATORS: mutators.OPERATORS_TYPE = [
    *((kind, operator) for kind, operator in mutators.mutation_operators if operator in KEPT),
    (cst.BooleanOperation, without_an_operand),
    (cst.If, forced_statement),
    (cst.CompIf, forced_comprehension),
    (cst.MatchCase, forced_guard),
    (cst.MatchOr, without_an_alternative),
    *state.OPERATORS,
]


class Visitor(MutationVisitor):
    """Decorated functions have mutants, too, as a file is replaced whole; an assertion's condition has none, and no
    `strict=True`, which asserts.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._declared_with: set[cst.CSTNode] = set()  # of classes

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and node.decorators:
            return False  # mutmut's visitor skips the decorators themselves
        if isinstance(node, cst.ClassDef):
            self._declared_with.update(node.keywords)
        asserts = isinstance(node, cst.Assert) or (
            isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value == "strict"
        )
        return node in self._declared_with or asserts or super()._skip_node_and_children(node)


class Mutant(NamedTuple):
    """One mutation of a file."""

    path: str
    line: int
    before: str
    after: str
    source: str


class File:
    """The mutations of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        code = path.read_text(encoding="utf-8")
        wrapper = MetadataWrapper(cst.parse_module(code))
        visitor = Visitor(OPERATORS, IgnoredCode(set(), set(), set()))
        self._module = wrapper.visit(visitor)
        self._lines = wrapper.resolve(PositionProvider)
        mutations = [one for one in visitor.mutations if decides(one)]
        self.of_state = [one for one in mutations if state.is_of(one.original_node, one.mutated_node)]
        self.of_rules = [one for one in mutations if not state.is_of(one.original_node, one.mutated_node)]

    def rendered(self, mutation: Mutation) -> Mutant:
        """As it is planted and printed."""
        changed: Any = deep_replace(self._module, mutation.original_node, mutation.mutated_node)
        old, new = self._module.code.splitlines(), changed.code.splitlines()
        first = next(at for at, (one, other) in enumerate(zip([*old, ""], [*new, ""], strict=False)) if one != other)
        same_at_end = 0
        while old[-1 - same_at_end] == new[-1 - same_at_end] and first + same_at_end < min(len(old), len(new)):
            same_at_end += 1
        before, after = (text[first : len(text) - same_at_end] for text in (old, new))
        return Mutant(str(self._path), first + 1, "\n".join(before), "\n".join(after), changed.code)


def decides(mutation: Mutation) -> bool:
    """Whether it changes a decision. `One | Other` outside of functions is a type, and no module with another operator
    there is imported.
    """
    node = mutation.original_node
    function = mutation.contained_by_top_level_function
    if isinstance(function, cst.FunctionDef):
        # What is not assigned when an object is made fails at its first use.
        return function.name.value != "__init__" or not state.is_dropped(node, mutation.mutated_node)
    is_type = isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.BitOr)
    return not is_type and not is_number(node)


def is_number(node: cst.CSTNode) -> bool:
    """Whether it is written with numbers alone: `2**16`, `-1`."""
    if isinstance(node, cst.UnaryOperation):
        return is_number(node.expression)
    if isinstance(node, cst.BinaryOperation):
        return is_number(node.left) and is_number(node.right)
    return isinstance(node, cst.BaseNumber)


def places(path: Path) -> tuple[int, int]:
    """Of rules, and of state, that may be changed: about as many as there are mutants."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    stored = sum(isinstance(one, ast.Attribute | ast.Subscript) and isinstance(one.ctx, ast.Store) for one in nodes)
    return sum(isinstance(one, RULES) for one in nodes), sum(isinstance(one, STATES) for one in nodes) + stored


def drawn(paths: Sequence[Path], seed: int, count: int) -> list[Mutant]:
    """Those that the seed draws, each once; fewer where there are no more."""
    random_ = random.Random(seed)
    weights = [places(path) for path in paths]
    kept: dict[Path, File] = {}
    chosen: dict[tuple[Path, bool], list[Mutation]] = {}
    found = []
    for at in range(100 * count):
        if len(found) == count:
            break
        of_state = at % 2 == 1
        if not any(each[of_state] for each in weights):
            continue
        path = random_.choices(paths, [each[of_state] for each in weights])[0]
        file = kept[path] = kept.get(path) or File(path)
        left = chosen.setdefault((path, of_state), file.of_state[:] if of_state else file.of_rules[:])
        if left:
            found.append(file.rendered(left.pop(random_.randrange(len(left)))))
    return found


def main() -> int:
    """Print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--mutants", type=int, required=True)
    options = parser.parse_args()
    mutants = drawn(options.paths, options.seed, options.mutants)
    sys.stdout.write(json.dumps([one._asdict() for one in mutants]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
