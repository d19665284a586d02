"""Writes tests/nova/RESULTS.md: which of Nova's tests and of the checks passed with the front, and why others did not.

python -m tests.nova.page RESULTS.json ...      what `scripts/nova test --json` wrote, in the order of the runs
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE, REASONS = HERE / "RESULTS.md", HERE / "reasons.toml"
CHECKS = "checks."
HEAD = """# Nova's tests with berth as their scheduler

Made by `page.py` from what `scripts/nova test --json` wrote; the reasons are in `reasons.toml`. Nova 34.0.0, RabbitMQ,
a stock nova-scheduler as the fallback. Tests that failed were run again alone; what passed only then says so.
"""
AGAIN = "passed when it was run again"
APART = "fails with a stock nova-scheduler in a process of its own as well"


def reason_of(name: str, reasons: dict[str, str]) -> str:
    """Why a test cannot pass from outside Nova's process; "": it could."""
    return next((why for part, why in reasons.items() if part in name), "")


def table(title: str, rows: list[dict[str, Any]], reasons: dict[str, str]) -> list[str]:
    """The outcomes of one kind, and two figures: of all, and of those that can pass."""
    passed = [one for one in rows if one["outcome"] == "passed"]
    able = [one for one in rows if one["outcome"] == "passed" or not reason_of(one["id"], reasons)]
    lines = [f"## {title}", "", f"{len(passed)} of {len(rows)} passed; of the {len(able)} that can, {len(passed)}.", ""]
    lines += ["| id | outcome | why |", "| --- | --- | --- |"]
    for one in sorted(rows, key=lambda row: str(row["id"])):
        why = reason_of(one["id"], reasons) or one["why"][:120].replace("|", "/")
        why = one["again"] if one["outcome"] == "passed" else why
        lines.append(f"| `{one['id'].removeprefix('nova.tests.functional.')}` | {one['outcome']} | {why} |")
    return [*lines, ""]


def main() -> None:
    """Write it."""
    found: dict[str, dict[str, Any]] = {}
    apart: dict[str, str] = {}
    for one in (one for path in sys.argv[1:] for one in json.loads(Path(path).read_text())):
        if one.get("mode") == "apart":
            apart[one["id"]] = one["outcome"]
            continue
        earlier = found.setdefault(one["id"], one | {"again": ""})
        if (earlier["outcome"], one["outcome"]) == ("failed", "passed"):
            found[one["id"]] = one | {"again": AGAIN}
    reasons = {name: APART for name, outcome in apart.items() if outcome == "failed"}
    reasons = tomllib.loads(REASONS.read_text())["reasons"] | reasons
    checks = [one for name, one in found.items() if name.startswith(CHECKS)]
    drawn = [one for name, one in found.items() if not name.startswith(CHECKS)]
    lines = [HEAD, *table("Checks", checks, reasons), *table("Tests of Nova's own", drawn, reasons)]
    PAGE.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
