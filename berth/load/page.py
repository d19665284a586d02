"""The common elements of every page: one file, no network, no script, readable in the light and in the dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# A policy for the reader's browser: nothing is fetched, nothing runs, whatever a name in the record contains.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"

STYLE = """
:root { color-scheme: light dark; --page: #fcfcfd; --card: #fff; --ink: #1b1f24; --soft: #59626e; --rule: #dfe3e8;
  --heat: #b3261e; --good: #1a7f4b; --bad: #b3261e;
  --c0: #2563b0; --c1: #d9730d; --c2: #1a8754; --c3: #b8408f; --c4: #7a5bd0; --c5: #0f8b9c; --c6: #8a6d1b;
  --c7: #6b7480 }
@media (prefers-color-scheme: dark) { :root { --page: #14171b; --card: #1c2026; --ink: #e6e9ed; --soft: #9aa4b0;
  --rule: #333a43; --heat: #ff7b6b; --good: #4cc38a; --bad: #ff8a80;
  --c0: #6aa5f0; --c1: #f2a25c; --c2: #5cc894; --c3: #e58bc6; --c4: #ac95f0; --c5: #55c3d3; --c6: #d0b45c;
  --c7: #9aa4b0 } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1640px; padding: 24px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums }
h1 { font-size: 22px; margin: 0 } h2 { font-size: 17px; margin: 32px 0 10px } p { margin: 4px 0; max-width: 100ch }
.soft, caption, .note { color: var(--soft); font-size: 13.5px } .good { color: var(--good) } .bad { color: var(--bad) }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0 }
.tiles div, figure, .table { background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 12px 16px; margin: 0 }
.tiles div { min-width: 128px } .tiles b { display: block; font-size: 23px; line-height: 1.25 }
.grid2 { display: grid; gap: 14px; grid-template-columns: repeat(auto-fill, minmax(min(620px, 100%), 1fr));
  align-items: start } .table { overflow-x: auto } .stack > * + * { margin-top: 14px }
figcaption { font-weight: 600; margin-bottom: 6px } svg { display: block; width: 100%; min-width: 540px; height: auto }
figure { overflow-x: auto }
figure ul { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; padding: 0; margin: 8px 0 0;
  font-size: 13px; color: var(--soft); overflow-wrap: anywhere }
figure i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px;
  background: var(--c) }
text { font-size: 11px; fill: var(--soft) } text.label { font-size: 11.5px; fill: var(--ink) }
line.grid { stroke: var(--rule); stroke-width: .7 } line.axis { stroke: var(--soft); stroke-width: 1 }
.c0 { --c: var(--c0) } .c1 { --c: var(--c1) } .c2 { --c: var(--c2) } .c3 { --c: var(--c3) } .c4 { --c: var(--c4) }
.c5 { --c: var(--c5) } .c6 { --c: var(--c6) } .c7 { --c: var(--c7) }
.fill { fill: var(--c) } .line { stroke: var(--c); stroke-width: 1.7; fill: none; stroke-linejoin: round }
.thin { stroke: var(--c); stroke-width: 1.6; opacity: .75 }
.dot { fill: var(--card); stroke: var(--ink); stroke-width: 1.4 }
.mark { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 3 3 } .heat { fill: var(--heat) }
.scale { gap: 2px 12px } .scale .heat { background: var(--heat) }
.scale li:first-child i { opacity: 1 !important; background: none; border: 1px solid var(--rule) }
.hit { fill: var(--ink); fill-opacity: 0 } .hit:hover { fill-opacity: .08 }
table { border-collapse: collapse; font-size: 14px; width: 100% } caption { text-align: left; padding-bottom: 6px }
th, td { text-align: right; padding: 3px 12px; border-bottom: 1px solid var(--rule); overflow-wrap: break-word }
td:not(.text), th { white-space: nowrap } th { font-weight: 600; color: var(--soft) }
tr:last-child td { border-bottom: 0 }
.text { text-align: left } th:first-child, td:first-child { padding-left: 0 }
"""


def page(title: str, body: Iterable[str]) -> str:
    """The whole file."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body></html>\n"
    )


def heading(text: str) -> str:
    """The page's own."""
    return f"<h1>{escape(text)}</h1>"


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", words: int = 1) -> str:
    """A table; every cell is text and escaped. The first so many columns are words, the others numbers."""

    def row(tag: str, cells: Sequence[str]) -> str:
        kinds = [' class="text"' if at < words else "" for at in range(len(cells))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    head = row("th", headers)
    lines = "".join(f"<tr>{row('td', cells)}</tr>" for cells in rows)
    above = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="table"><table>{above}<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def tiles(values: Iterable[tuple[str, str, str]]) -> str:
    """Large numbers: (value, what it is, "good", "bad" or "")."""
    boxes = "".join(
        f'<div><b class="{escape(kind)}">{escape(value)}</b><span class="soft">{escape(name)}</span></div>'
        for value, name, kind in values
    )
    return f'<div class="tiles">{boxes}</div>'


def section(title: str, *parts: str) -> str:
    """A heading and what belongs to it, side by side where there is room; nothing without parts."""
    found = [part for part in parts if part]
    return f'<h2>{escape(title)}</h2><div class="grid2">{"".join(found)}</div>' if found else ""


def stack(*parts: str) -> str:
    """One above the other in one place of a section."""
    found = "".join(parts)
    return f'<div class="stack">{found}</div>' if found else ""


def note(text: str) -> str:
    """A sentence in small."""
    return f'<p class="note">{escape(text)}</p>'
