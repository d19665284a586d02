"""Rename what the types do not reach: `texts.py ROWS.tsv [--apply]`.

ROWS: a TSV of path patterns (git pathspecs, divided by spaces; `:!path` excludes), a regular expression, and its
replacement (with `\\1`). Prints the number of places of each row; a row that finds none fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

NOT_HERE = ("scripts/rename/", "CHANGELOG.md", "uv.lock")


def files_of(pathspecs: list[str]) -> list[Path]:
    """What Git has there, without these scripts and what they must not touch.

    (Git 2.39 lists nothing for the path of one file beside a path that it is to exclude.)
    """
    listed = subprocess.run(["git", "ls-files", "-z", "--", *pathspecs], capture_output=True, check=True, text=True)
    return [
        Path(one) for one in listed.stdout.split("\0") if one and not one.startswith(NOT_HERE) and Path(one).is_file()
    ]


def main(words: list[str]) -> int:
    """Print what is found; with --apply, write it."""
    texts: dict[Path, str] = {}
    failed = False
    for line in Path(words[0]).read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        where, pattern, new = line.split("\t")[:3]
        expression = re.compile(pattern, re.MULTILINE)
        places = 0
        for path in files_of(where.split()):
            try:
                text = texts.get(path) or path.read_text()
            except UnicodeDecodeError:
                continue
            texts[path], count = expression.subn(new, text)
            places += count
        failed |= not places
        print(f"{pattern} -> {new}: {places or 'NOWHERE'}")
    if "--apply" in words:
        for path, text in texts.items():
            if text != path.read_text():
                path.write_text(text)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
