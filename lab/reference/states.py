"""docs/reference/states.md: the conductor's state machine, drawn from its table."""

from __future__ import annotations

from inspect import cleandoc

from cell_conductor.domain.desires import DESIRES, Ask
from cell_conductor.domain.events import EVENTS
from cell_conductor.domain.instance import State
from cell_conductor.domain.table import IGNORE, TABLE, Rule

HEAD = """# States of an instance

Derived from `cell_conductor/domain/table.py` by `scripts/nightly docs`; a test compares.

The state determines the allocation: one attempt's allocation is held in `building`, `active` and `deleting`;
`reclaiming`, `adopting` and `abandoning` ask placement to release and claim in one go, `giving_up` and `releasing` ask
it to release. In a move the migration holds the source and the instance its destination: `claiming` requests one,
`reverting` gives the instance its source again, `releasing_source` releases the migration; `vacating` releases what a
shelved one held. Of an instance that leaves for another cell, `reassigning` gives the allocation to the migration,
which holds it in `kept` and `clearing`, and `releasing_kept` releases it.
In every other state nothing is held. A host that never confirms a destroy keeps its allocation: what may
still run there must not be promised to another consumer.
"""


def render() -> str:
    """docs/reference/states.md, whole."""
    return "\n".join([HEAD, *_diagram(), "", *_matrix(), "", *_rules(), "", *_placement_requests()]) + "\n"


def _diagram() -> list[str]:
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> absent"]
    for state, row in TABLE.items():
        lines += [
            f"    {state} --> {target}: {event.__name__}"
            for event, rule in row.items()
            if rule is not None
            for target in rule.to
        ]
    return [*lines, "    deleted --> [*]", "```"]


def _matrix() -> list[str]:
    return [
        "## Every state, every event",
        "",
        "`-`: nothing changes (late, doubled or already taken care of). `x`: cannot happen; the process stops.",
        "",
        "| event | " + " | ".join(State) + " |",
        "| --- |" + " --- |" * len(State),
        *(f"| {event.__name__} | {' | '.join(_cell(TABLE[state][event]) for state in State)} |" for event in EVENTS),
    ]


def _cell(rule: Rule | None) -> str:
    if rule is None:
        return "x"
    if rule == IGNORE:
        return "-"
    return f"`{rule.name}`" + (" → " + " or ".join(rule.to) if rule.to else "")


def _rules() -> list[str]:
    found = {rule.name: rule for row in TABLE.values() for rule in row.values() if rule is not None}
    lines = ["## The rules", ""]
    return lines + [f"- `{name}`: {cleandoc(found[name].apply.__doc__ or '')}" for name in sorted(found)]


def _placement_requests() -> list[str]:
    claim = ", ".join(f"`{state}`" for state in State if DESIRES[state].asks is Ask.CLAIM)
    release = ", ".join(f"`{state}`" for state in State if DESIRES[state].asks is Ask.RELEASE)
    return [
        "## Requests to placement",
        "",
        f"- {claim}: `placement.claim.v1` with `release_first`, the next attempt's number, and the alternates left.",
        f"- {release}: `placement.release.v1` of this attempt or an older one; then, of an instance that was moving",
        "  when it was deleted or lost, of its migration.",
        "- `claiming`: the same with a `migration`, and with `release_first` from the second destination on.",
        "- `reassigning`: the same with a `migration` and without alternates.",
        "- `reverting`: `placement.revert.v1`, under the next attempt's number.",
        "- `releasing_source`, `releasing_kept`: `placement.release.v1` of the migration.",
    ]
