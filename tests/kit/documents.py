"""The fenced blocks of the documents, as tests execute and parse them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The pages for users; decision records are of the past.
KINDS = ("start", "operate", "use", "concepts", "reference", "contributing")
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *ROOT.glob("*/README.md"),
    *(path for kind in KINDS for path in (ROOT / "docs" / kind).glob("*.md")),
)


def blocks(language: str, *pages: str) -> list[str]:
    """The fenced blocks of a language, also those inside a list; their indentation is taken off."""
    found = [re.findall(r"^ *```(\w*)\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL) for page in pages]
    return [textwrap.dedent(block) for page in found for kind, block in page if kind == language]


def blocks_of_all_pages(language: str) -> Iterator[tuple[str, str]]:
    """(where: the page and the number of the block in it, text)."""
    for path in sorted(PAGES):
        for number, text in enumerate(blocks(language, path.read_text()), 1):
            yield f"{path.relative_to(ROOT)}-{number}", text


def typed(console: str) -> str:
    """The commands of a block of console output: the lines after a prompt, with those that continue them."""
    lines, goes_on = [], False
    for line in console.splitlines():
        if line.startswith("$ ") or goes_on:
            lines.append(line.removeprefix("$ "))
            goes_on = line.endswith("\\")
    return "\n".join(lines)
