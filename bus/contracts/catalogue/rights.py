"""An operator's rights: the fields of a project's messages that only an operator may use, in one table.

Every door goes by it. The bus: a message that uses such a field leaves by the default exchange, to its queue itself,
where no project's user may write (`destination`); under a project's routing key it is refused (`may_come_under`). The
HTTP API: a token of role project is refused. As in Nova's default policies, which host an instance is on is an
operator's affair, and so is a request that passes over a check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bus.contracts.base import Message
from bus.contracts.build import BuildRequest
from bus.contracts.moves import MoveKind, MoveRequest

FORBIDDEN = "role.forbidden"

# {message: {field: the values that are an operator's; None: every value but the default}}. All other fields of a
# message that a project publishes are the project's.
OPERATORS: Mapping[type[Message], Mapping[str, frozenset[Any] | None]] = {
    BuildRequest: {
        "host": None,
        "forced": None,  # past the filters
    },
    MoveRequest: {
        "kind": frozenset({MoveKind.MIGRATE, MoveKind.LIVE_MIGRATE, MoveKind.EVACUATE}),
        "host": None,
        "forced": None,  # past the filters
        "fenced": None,  # the statement that the host is off
        "force": None,  # a machine is given up, or started, without the proof that it may be
    },
}


def _defaults(kind: type[Message]) -> dict[str, Any]:
    fields, defaults = kind.__struct_fields__, kind.__struct_defaults__
    return dict(zip(fields[len(fields) - len(defaults) :], defaults, strict=True))


def _rule(kind: type[Message]) -> tuple[tuple[str, frozenset[Any] | None, Any], ...]:
    return tuple((field, values, _defaults(kind).get(field)) for field, values in OPERATORS[kind].items())


_RULES = {kind: _rule(kind) for kind in OPERATORS}


def operators_rights(message: Message) -> tuple[str, ...]:
    """The fields by which a message requests what only an operator may; empty: any project may publish it."""
    rule = _RULES.get(type(message))
    if rule is None:
        return ()
    return tuple(
        field
        for field, values, default in rule
        if (getattr(message, field) != default if values is None else getattr(message, field) in values)
    )


def forbidden(message: Message) -> str:
    """Why a project's message is refused, in words."""
    used = ", ".join(f"{field}={getattr(message, field)!s}" for field in operators_rights(message))
    return f"only an operator may request {used}"
