"""Which keywords of `replace` ran: BERTH_REPLACE_SITES=FILE has pytest append each `struct field file:line` to FILE.

.venv/bin/python -m tests.kit.replace_sites FILE    the keywords whose struct neither an annotation nor a run tells
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from tests.kit.sources import OURS, ROOT, TESTING, sources
from tests.kit.struct_types import replaces

VARIABLE = "BERTH_REPLACE_SITES"


def record_to(path: str) -> None:
    """Count from now on. Modules that have imported `replace` already are not seen."""
    inner = msgspec.structs.replace
    seen: set[tuple[type, str, str, int]] = set()
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def replace(struct: Any, /, **changes: Any) -> Any:
        frame = sys._getframe(1)
        for field in changes:
            site = (type(struct), field, frame.f_code.co_filename, frame.f_lineno)
            if site not in seen:
                seen.add(site)
                os.write(out, f"{site[0].__qualname__} {field} {site[2]}:{site[3]}\n".encode())
        return inner(struct, **changes)

    msgspec.structs.replace = replace


def unseen(ran: Path) -> list[str]:
    """`file:line field` of each keyword that no run and no annotation gives a struct to."""
    # A call of several lines runs at its first one, or at that of its argument.
    lines = {(Path(place.rpartition(":")[0]), int(place.rpartition(":")[2]), field) for _, field, place in _rows(ran)}
    return [
        f"{call.path.relative_to(ROOT)}:{call.line} {field}"
        for path in sources(*OURS, *TESTING)
        for call in replaces(path)
        if call.of is None
        for field in call.keywords
        if not any((call.path, call.line + more, field) in lines for more in range(30))
    ]


def _rows(ran: Path) -> list[tuple[str, str, str]]:
    found = []
    for line in ran.read_text().splitlines():
        kind, field, place = line.split(" ", 2)
        found.append((kind, field, place))
    return found


if __name__ == "__main__":
    sys.stdout.write("".join(f"{one}\n" for one in unseen(Path(sys.argv[1]))))
