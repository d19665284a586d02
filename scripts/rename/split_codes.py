"""Move the tables of each `codes.toml` whose code only another package has to the `codes.toml` of that package."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.kit.sources import literals, of_package  # noqa: E402

# From which package to which: the first that has the code.
MOVES = {
    "scheduler_worker": ("nova_scheduler",),
    "compute_sim": ("compute_agent",),
    "berth": ("compute_sim", "lab.load"),
}
HEAD = (
    "# The codes of {}: cause and remedy. `scripts/nightly docs` writes docs/reference/codes.md from these tables.\n\n"
)


def main() -> None:
    """Write them; `sort_codes.py` sorts them afterwards."""
    for old, places in MOVES.items():
        path = ROOT / old / "codes.toml"
        head, *tables = re.split(r"^(?=\[)", path.read_text(), flags=re.MULTILINE)
        moved: dict[str, list[str]] = {}
        for table in list(tables):
            code = table.partition("]")[0].strip('["')
            place = next((one for one in places if code in _codes(one)), None)
            if place is not None and (code not in _codes(old) or old == "compute_sim"):
                tables.remove(table)
                moved.setdefault(place, []).append(table.rstrip("\n") + "\n")
        path.write_text((head + "".join(tables)).rstrip("\n") + "\n")
        for place, found in moved.items():
            target = ROOT / place.replace(".", "/") / "codes.toml"
            known = target.read_text().rstrip("\n") + "\n\n" if target.exists() else HEAD.format(place)
            target.write_text(known + "\n".join(found))
            print(f"{old} -> {place}: {len(found)}")


def _codes(package: str) -> set[str]:
    return {*of_package(package.replace(".", "/")), *literals(package.replace(".", "/"))}


if __name__ == "__main__":
    main()
