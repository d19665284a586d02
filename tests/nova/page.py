"""Writes tests/nova/RESULTS.md: which of Nova's tests and of the checks passed with the front, and why others did not.

    python -m tests.nova.page RESULTS.json ... [BENCH.jsonl]

RESULTS.json: what `scripts/nova test --json` wrote, in the order of the runs. BENCH.jsonl: what `scripts/nova bench
--work DIRECTORY` left there.
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

Made by `page.py` from what `scripts/nova test --json` wrote; the reasons are in `reasons.toml`. RabbitMQ, a stock
nova-scheduler as the fallback. Tests that failed were run again alone; what passed only then says so.
All of `nova.tests.functional` were run but those of its database's own code, none of which starts a scheduler; of those
that were run, the ones that ask for hosts, or that failed before they could, are listed.
"""
AGAIN = "passed when it was run again"
APART = "fails with a stock nova-scheduler in a process of its own as well"


class Reasons:
    """Why tests cannot pass from outside Nova's process: by a part of their ids, and those that fail `apart` too."""

    def __init__(self, parts: dict[str, str], apart: set[str]) -> None:
        self._parts, self._apart = parts, apart

    def of(self, name: str) -> str:
        """ "": it could pass."""
        known = next((why for part, why in self._parts.items() if part in name), "")
        return known or (APART if name in self._apart else "")


def table(title: str, rows: list[dict[str, Any]], reasons: Reasons) -> list[str]:
    """The outcomes of one kind, and two figures: of all, and of those that can pass."""
    passed = [one for one in rows if one["outcome"] == "passed"]
    able = [one for one in rows if one["outcome"] == "passed" or not reasons.of(one["id"])]
    lines = [f"## {title}", "", f"{len(passed)} of {len(rows)} passed; of the {len(able)} that can, {len(passed)}.", ""]
    lines += ["| id | outcome | why |", "| --- | --- | --- |"]
    for one in sorted(rows, key=lambda row: str(row["id"])):
        why = reasons.of(one["id"]) or one["why"][:120].replace("|", "/")
        why = one["again"] if one["outcome"] == "passed" else why
        lines.append(f"| `{one['id'].removeprefix('nova.tests.functional.')}` | {one['outcome']} | {why} |")
    return [*lines, ""]


def measured(path: Path) -> list[str]:
    """What a call costs a front and a stock nova-scheduler."""
    lines = ["## One call of `select_destinations`", "", "One after the other, in one run (`scripts/nova bench`).", ""]
    lines += ["| scheduler | hosts | calls | ms, median | CPU ms of the scheduler | CPU ms of placement | load |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    keys = ("who", "hosts", "calls", "median_ms", "cpu_ms_a_call", "placement_cpu_ms_a_call", "load")
    for one in map(json.loads, path.read_text().splitlines()):
        lines.append(f"| {' | '.join(str(one[key]) for key in keys)} |")
    return [*lines, ""]


def main() -> None:
    """Write it."""
    paths = [Path(one) for one in sys.argv[1:]]
    benches = [path for path in paths if path.suffix == ".jsonl"]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    apart: set[str] = set()
    for one in (one for path in paths if path not in benches for one in json.loads(path.read_text())):
        if one["mode"] == "apart":
            apart |= {one["id"]} if one["outcome"] == "failed" else set()
            continue
        earlier = found.setdefault((one["nova"], one["id"]), one | {"again": ""})
        if (earlier["outcome"], one["outcome"]) == ("failed", "passed"):
            found[one["nova"], one["id"]] = one | {"again": AGAIN}
    lines, known = [HEAD, *(line for path in benches for line in measured(path))], tomllib.loads(REASONS.read_text())
    for release in sorted({release for release, _ in found}, reverse=True):
        reasons = known["reasons"] | known.get(f"reasons_of_{release.partition('.')[0]}", {})
        for title, is_check in (("checks", True), ("tests of Nova's own", False)):
            rows = [one for (of, name), one in found.items() if of == release and name.startswith(CHECKS) is is_check]
            lines += table(f"Nova {release}: {title}", rows, Reasons(reasons, apart)) if rows else []
    PAGE.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
