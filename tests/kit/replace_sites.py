"""The keywords of `replace` that neither an annotation nor a run gives a struct to.

REPLACE_SITES=FILE scripts/test; .venv/bin/python -m tests.kit.replace_sites FILE
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.kit.sources import OURS, ROOT, TESTING, sources
from tests.kit.struct_types import replaces

# A call of several lines is recorded at one of them.
LINES = 30


def unseen(ran: Path) -> list[str]:
    """`file:line field` of each."""
    known = set()
    for row in ran.read_text().splitlines():
        _, field, place = row.split(" ", 2)
        path, _, line = place.rpartition(":")
        known.add((Path(path), int(line), field))
    return [
        f"{call.path.relative_to(ROOT)}:{call.line} {field}"
        for path in sources(*OURS, *TESTING)
        for call in replaces(path)
        if call.of is None
        for field in call.keywords
        if not any((call.path, call.line + more, field) in known for more in range(LINES))
    ]


if __name__ == "__main__":
    sys.stdout.write("".join(f"{one}\n" for one in unseen(Path(sys.argv[1]))))
