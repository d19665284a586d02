"""docs/reference/states.md: the conductor's state machine, drawn from its table."""

from __future__ import annotations

from inspect import cleandoc

from cell_conductor.state.desired_state import DESIRED_STATES, phase_to_text
from cell_conductor.state.events import EVENTS
from cell_conductor.state.instance import State
from cell_conductor.table import BLOCKED, IGNORE, TABLE, ByNextState, Cell, Rule, rules_of


def content() -> dict[str, object]:
    """What the page shows."""
    return {
        "TABLE": TABLE,
        "State": list(State),
        "EVENTS": EVENTS,
        "cell": _cell,
        "cleandoc": cleandoc,
        "rules": sorted({r.name: r for row in TABLE.values() for cell in row.values() for r in rules_of(cell)}.items()),
        "blocked": [(event.__name__, _cell(cell)) for event, cell in BLOCKED.items() if cell != IGNORE],
        "rules_blocked": {rule.name: rule for cell in BLOCKED.values() for rule in rules_of(cell) if rule != IGNORE},
        "targets": _targets,
        "desires": [(phase_to_text(phase), row) for phase, row in DESIRED_STATES.items()],
    }


def _targets(cell: Cell) -> list[State]:
    return list(dict.fromkeys(target for rule in rules_of(cell) for target in rule.to))


def _cell(cell: Cell) -> str:
    if not isinstance(cell, ByNextState):
        return _rule(cell)
    parts = [f"then {then}: {_rule(rule)}" for then, rule in cell.rules.items()]
    if cell.otherwise is not None:
        parts.append(f"otherwise: {_rule(cell.otherwise)}")
    return "; ".join(parts)


def _rule(rule: Rule | None) -> str:
    if rule is None:
        return "x"
    if rule == IGNORE:
        return "-"
    return f"`{rule.name}`" + (" → " + " or ".join(rule.to) if rule.to else "")
