"""Sorts the rows of each `codes.toml` by their names: `python -m lab.reference.sort_codes`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path


def main() -> None:
    """Write those that are not sorted."""
    listed = subprocess.run(["git", "ls-files", "*codes.toml"], capture_output=True, check=True, text=True)
    for path in map(Path, listed.stdout.split()):
        text = path.read_text()
        head, *tables = re.split(r"^(?=\[)", text, flags=re.MULTILINE)
        rows = sorted((one.rstrip("\n") for one in tables), key=lambda one: one.partition("]")[0].strip('["'))
        if (ordered := head + "\n\n".join(rows) + "\n") != text:
            path.write_text(ordered)
            print(path)  # noqa: T201


if __name__ == "__main__":
    main()
