"""docs/reference/states.md: the conductor's state machine, drawn from its table."""

from __future__ import annotations

from inspect import cleandoc

from cell_conductor.domain.desires import DESIRES, Ask
from cell_conductor.domain.events import EVENTS
from cell_conductor.domain.instance import State
from cell_conductor.domain.table import IGNORE, TABLE, Rule


def content() -> dict[str, object]:
    """What the page shows."""
    return {
        "TABLE": TABLE,
        "State": list(State),
        "EVENTS": EVENTS,
        "cell": _cell,
        "cleandoc": cleandoc,
        "rules": sorted({r.name: r for row in TABLE.values() for r in row.values() if r is not None}.items()),
        "claims": ", ".join(f"`{state}`" for state in State if DESIRES[state].asks is Ask.CLAIM),
        "releases": ", ".join(f"`{state}`" for state in State if DESIRES[state].asks is Ask.RELEASE),
    }


def _cell(rule: Rule | None) -> str:
    if rule is None:
        return "x"
    if rule == IGNORE:
        return "-"
    return f"`{rule.name}`" + (" → " + " or ".join(rule.to) if rule.to else "")
