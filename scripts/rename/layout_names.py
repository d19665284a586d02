"""Rename the symbols of `layout.tsv` as rows of `by_type.py` have renamed them: `layout_names.py ROWS.tsv...`."""

from __future__ import annotations

import sys
from pathlib import Path

LAYOUT = Path(__file__).parent / "layout.tsv"


def main(words: list[str]) -> None:
    """Write it."""
    rows = [
        line.split("\t")[:2]
        for word in words
        for line in Path(word).read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    new = {tuple(old.rpartition(".")[::2]): name for old, name in rows}
    lines = [line.split("\t") for line in LAYOUT.read_text().splitlines()]
    for parts in lines:
        if len(parts) > 1:
            parts[1] = new.get((parts[0], parts[1]), parts[1])
    LAYOUT.write_text("".join("\t".join(parts) + "\n" for parts in lines))


if __name__ == "__main__":
    main(sys.argv[1:])
