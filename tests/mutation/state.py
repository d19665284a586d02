"""Mutants of state: what an object keeps is not kept, or is read at another moment.

An assignment to an attribute or into one (its value is still computed), a change by a method (`self.waiting.clear()`)
or a `del` is left out; `|=` and `+=` become `=`; of two that are merged (`{**a, **b}`, `a | {...}`, `a or b`) the other
one goes first; a read moves across the `await` beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst
import libcst.matchers as m
from mutmut.mutation import mutators

CHANGING = {
    "add", "append", "appendleft", "clear", "discard", "extend", "pop", "popitem", "popleft", "remove", "set",
    "setdefault", "update",
}  # fmt: skip


def is_kept(node: cst.CSTNode) -> bool:
    """Whether an object keeps it: `self.x`, `self.x[one]`, `host.seen_at`."""
    while isinstance(node, cst.Subscript):
        node = node.value
    return isinstance(node, cst.Attribute)


def without_assignment(node: cst.Assign | cst.AnnAssign | cst.AugAssign) -> Iterator[cst.Expr]:
    """The value alone."""
    targets = [one.target for one in node.targets] if isinstance(node, cst.Assign) else [node.target]
    if node.value is not None and all(is_kept(one) for one in targets):
        yield cst.Expr(node.value, semicolon=node.semicolon)


def without_change(node: cst.Expr) -> Iterator[cst.Pass]:
    """Of what a method changes."""
    call = node.value
    method = call.func if isinstance(call, cst.Call) else None
    if isinstance(method, cst.Attribute) and method.attr.value in CHANGING and is_kept(method.value):
        yield cst.Pass(semicolon=node.semicolon)


def without_deletion(node: cst.Del) -> Iterator[cst.Pass]:
    """Of an item or an attribute."""
    if is_kept(node.target):
        yield cst.Pass(semicolon=node.semicolon)


def merged_otherwise(node: cst.Dict) -> Iterator[cst.Dict]:
    """`{**a, **b}`: each two beside each other, one of them a whole mapping."""
    for at, (one, other) in enumerate(zip(node.elements, node.elements[1:], strict=False)):
        if isinstance(one, cst.StarredDictElement) or isinstance(other, cst.StarredDictElement):
            swapped = [other.with_changes(comma=one.comma), one.with_changes(comma=other.comma)]
            yield node.with_changes(elements=[*node.elements[:at], *swapped, *node.elements[at + 2 :]])


def united_otherwise(node: cst.BinaryOperation) -> Iterator[cst.BinaryOperation]:
    """`a | {...}` of mappings; of sets it is the same."""
    is_mapping = m.Dict() | m.DictComp() | m.Call(func=m.Name("dict"))
    if isinstance(node.operator, cst.BitOr) and any(m.matches(one, is_mapping) for one in (node.left, node.right)):
        yield node.with_changes(left=node.right, right=node.left)


def chosen_otherwise(node: cst.Assign | cst.AnnAssign | cst.Return | cst.Arg) -> Iterator[cst.CSTNode]:
    """`a or b` as a value; of truths it is the same, and with a default first it is the default."""
    is_truth = m.Comparison() | m.UnaryOperation(operator=m.Not()) | m.BooleanOperation(operator=m.And())
    is_default = m.SimpleString() | m.Integer() | m.Float() | m.Tuple() | m.List() | m.Dict() | m.Name("None")
    value = node.value
    if not (isinstance(value, cst.BooleanOperation) and isinstance(value.operator, cst.Or)):
        return
    if not any(m.matches(one, is_truth | is_default) for one in (value.left, value.right)):
        yield node.with_changes(value=value.with_changes(left=value.right, right=value.left))


def read_at_another_moment(node: cst.IndentedBlock) -> Iterator[cst.IndentedBlock]:
    """`x = self.y` before the `await` that it stands behind, and the other way."""
    for at, (one, other) in enumerate(zip(node.body, node.body[1:], strict=False)):
        for read, waiting in ((one, other), (other, one)):
            if is_read(read) and m.findall(waiting, m.Await()) and not depend(read, waiting):
                yield node.with_changes(body=[*node.body[:at], other, one, *node.body[at + 2 :]])


def is_read(node: cst.CSTNode) -> bool:
    """`x = ...` of what an object keeps."""
    read = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(target=m.Name())])])
    return m.matches(node, read) and not m.findall(node, m.Await()) and bool(m.findall(node, m.Attribute()))


def depend(read: cst.CSTNode, waiting: cst.CSTNode) -> bool:
    """Whether one names what the other assigns: it would fail at once."""
    return bool(assigned(read) & names(waiting)) or bool(assigned(waiting) & names(read))


def names(node: cst.CSTNode) -> set[str]:
    """All."""
    return {one.value for one in m.findall(node, m.Name()) if isinstance(one, cst.Name)}


def assigned(node: cst.CSTNode) -> set[str]:
    """Of targets, each with what they name."""
    target = m.AssignTarget() | m.AsName() | m.NamedExpr() | m.For() | m.AugAssign() | m.AnnAssign()
    return {
        name
        for one in m.findall(node, target)
        for name in names(one.name if isinstance(one, cst.AsName) else one.target)  # type: ignore[attr-defined]
    }


OPERATORS: mutators.OPERATORS_TYPE = [
    (cst.Assign, without_assignment),
    (cst.AnnAssign, without_assignment),
    (cst.AugAssign, without_assignment),
    (cst.AugAssign, mutators.operator_augmented_assignment),
    (cst.Expr, without_change),
    (cst.Del, without_deletion),
    (cst.Dict, merged_otherwise),
    (cst.BinaryOperation, united_otherwise),
    (cst.Assign, chosen_otherwise),
    (cst.AnnAssign, chosen_otherwise),
    (cst.Return, chosen_otherwise),
    (cst.Arg, chosen_otherwise),
    (cst.IndentedBlock, read_at_another_moment),
]


def is_dropped(before: cst.CSTNode, after: cst.CSTNode) -> bool:
    """Whether it leaves a statement out."""
    return isinstance(after, cst.Expr | cst.Pass) and not isinstance(before, cst.BaseExpression)


def is_of(before: cst.CSTNode, after: cst.CSTNode) -> bool:
    """Whether it is one of these: no rule of mutmut's changes such a node."""
    kinds = cst.Dict | cst.AugAssign | cst.Expr | cst.Del | cst.Assign | cst.AnnAssign | cst.Return | cst.Arg
    if isinstance(before, cst.BinaryOperation):
        return isinstance(after, cst.BinaryOperation) and after.left is before.right
    return isinstance(before, kinds | cst.IndentedBlock)
