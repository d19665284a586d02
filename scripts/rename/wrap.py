"""After a rename: fill docstrings and comments again whose lines are too long, and lay out such code that `# fmt: skip`
kept from it. Run after `ruff format`, and then `ruff format` once more. Strings that are too long stay, for hands.
"""

from __future__ import annotations

import ast
import json
import subprocess
from collections import defaultdict
from pathlib import Path

WIDTH = 120


def too_long() -> dict[Path, list[int]]:
    """{file: its lines that are too long}."""
    done = subprocess.run(
        [".venv/bin/ruff", "check", "--select", "E501", "--output-format", "json", "."],
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[Path, list[int]] = defaultdict(list)
    for one in json.loads(done.stdout):
        found[Path(one["filename"])].append(one["location"]["row"])
    return found


def docstrings(tree: ast.AST) -> set[int]:
    """The lines of docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def filled(lines: list[str], at: int, prefix: str) -> None:
    """Move what is too much of a line to the next one of its paragraph, or to a new one."""
    line = lines[at].rstrip("\n")
    closes = line.endswith('"""') and line.strip() != '"""'
    if closes:
        line = line[:-3]
        lines[at : at + 1] = [line + "\n", prefix + '"""\n']
    while len(line) > WIDTH:
        cut = line.rfind(" ", len(prefix) + 1, WIDTH + 1)
        if cut <= len(prefix):
            return
        rest, lines[at] = line[cut + 1 :], line[:cut].rstrip() + "\n"
        after = lines[at + 1] if at + 1 < len(lines) else ""
        text = after[len(prefix) :].rstrip("\n")
        same = after.startswith(prefix) and text and not text[0].isspace() and text != '"""' and text[0] not in "-*|#"
        if same:
            lines[at + 1] = f"{prefix}{rest} {text}\n"
        else:
            lines.insert(at + 1, f"{prefix}{rest}\n")
        at += 1
        line = lines[at].rstrip("\n")
        if len(line) > WIDTH and line.endswith('"""'):
            filled(lines, at, prefix)
            return


def main() -> None:
    """Write them."""
    for path, rows in too_long().items():
        text = path.read_text()
        tree = ast.parse(text)
        inside = docstrings(tree)
        lines = text.splitlines(keepends=True)
        for row in sorted(rows, reverse=True):
            line = lines[row - 1]
            indent = line[: len(line) - len(line.lstrip())]
            if line.lstrip().startswith("# "):
                filled(lines, row - 1, indent + "# ")
            elif row in inside:
                filled(lines, row - 1, indent)
            else:
                around = [
                    one
                    for one in ast.walk(tree)
                    if isinstance(one, ast.stmt | ast.arg | ast.expr) and one.lineno <= row <= (one.end_lineno or 0)
                ]
                for one in around:
                    for at in {(one.end_lineno or 0) - 1, row - 1, (one.end_lineno or 0)} & set(range(len(lines))):
                        if "# fmt: skip" in lines[at]:
                            lines[at] = lines[at].replace("  # fmt: skip", "")
        path.write_text("".join(lines))


if __name__ == "__main__":
    main()
