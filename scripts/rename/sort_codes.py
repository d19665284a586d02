"""Sort the tables of each `codes.toml` by their names, after texts rows have renamed codes."""

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
        tables = [one.rstrip("\n") for one in tables]
        again = head + "\n\n".join(sorted(tables, key=lambda one: one.partition("]")[0].strip('["'))) + "\n"
        if again != text:
            path.write_text(again)
            print(path)


if __name__ == "__main__":
    main()
