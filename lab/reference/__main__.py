"""`python -m lab.reference [DIR]` writes the derived pages into docs/reference."""

from __future__ import annotations

import sys
from pathlib import Path

from lab.reference.pages import PAGES

directory = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/reference")
for name, render in PAGES.items():
    (directory / name).write_text(render())
