"""docs/reference/states.md: the conductor's state machine, drawn from its table."""

from __future__ import annotations

from inspect import cleandoc

from cell_conductor.state.desired_state import DESIRED_STATES, phase_to_text
from cell_conductor.state.events import EVENTS
from cell_conductor.state.instance import State
from cell_conductor.table import BLOCKED, IGNORE, TABLE, ByNextState, Entry, Rule, rules_of


def content() -> dict[str, object]:
    """What the page shows."""
    return {
        "TABLE": TABLE,
        "State": list(State),
        "EVENTS": EVENTS,
        "entry": _entry,
        "cleandoc": cleandoc,
        "rules": sorted(
            {r.name: r for row in TABLE.values() for entry in row.values() for r in rules_of(entry)}.items()
        ),
        "blocked": [(event.__name__, _entry(entry)) for event, entry in BLOCKED.items() if entry != IGNORE],
        "rules_blocked": {rule.name: rule for entry in BLOCKED.values() for rule in rules_of(entry) if rule != IGNORE},
        "targets": _targets,
        "desires": [(phase_to_text(phase), row) for phase, row in DESIRED_STATES.items()],
    }


def _targets(entry: Entry) -> list[State]:
    return list(dict.fromkeys(target for rule in rules_of(entry) for target in rule.to))


def _entry(entry: Entry) -> str:
    if not isinstance(entry, ByNextState):
        return _rule(entry)
    parts = [f"then {then}: {_rule(rule)}" for then, rule in entry.rules.items()]
    if entry.otherwise is not None:
        parts.append(f"otherwise: {_rule(entry.otherwise)}")
    return "; ".join(parts)


def _rule(rule: Rule | None) -> str:
    if rule is None:
        return "x"
    if rule == IGNORE:
        return "-"
    return f"`{rule.name}`" + (" → " + " or ".join(rule.to) if rule.to else "")
