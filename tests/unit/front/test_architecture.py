"""docs/explanation/architecture.md names what exists, and the snippets of the guides are settings and commands."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import yaml

from berth.commands.objects import read_file
from berth.settings import read_settings
from bus.contracts.objects import ObjectsChange
from scheduler_worker.domain.objects import ChangePlan, plan
from tests.unit.front.test_readme import blocks

ROOT = Path(__file__).parents[3]
TABLE = (ROOT / "docs" / "explanation" / "architecture.md").read_text().partition("## Where to put the next")[2]
NAMED = re.findall(r"`([\w./]+/[\w./]*?)(?:::(\w+))?`", TABLE)
GUIDES = sorted(path for kind in ("tutorial", "howto") for path in (ROOT / "docs" / kind).glob("*.md"))
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", *ROOT.glob("*/README.md")])

# What a reader runs beside berth's own commands.
PROGRAMS = {
    ".venv/bin/berth",
    ".venv/bin/python",
    "berth",
    "cp",
    "pg_dump",
    "pg_restore",
    "podman",
    "podman-compose",
    "ps",
    "python3",
    "rabbitmqctl",
    "systemctl",
}


@pytest.mark.parametrize(("path", "test"), [named for named in NAMED if not named[0].startswith(("store/", "domain/"))])
def test_a_place_that_the_table_names_exists(path: str, test: str) -> None:
    assert (ROOT / path).exists()
    assert not test or re.search(rf"^(async )?def {test}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_the_table_names_places_and_tests() -> None:
    assert sum(bool(test) for _, test in NAMED) >= 8 and len(NAMED) >= 20


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_settings_on_a_page_are_settings(page: Path, tmp_path: Path) -> None:
    for number, text in enumerate(blocks("toml", page.read_text())):
        if text.startswith("[[tokens]]"):  # the file of the web interface's users
            assert tomllib.loads(text)["tokens"]
            continue
        path = tmp_path / f"{number}.toml"
        path.write_text(text)
        if text.startswith("[flavors"):  # a file for `berth apply`
            planned = plan(ObjectsChange(changes=tuple(read_file(path)[0]), who="a reader"), {})
            assert isinstance(planned, ChangePlan), planned
            continue
        read_settings(path, {})


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_a_shell_line_on_a_page_starts_a_program_that_the_guides_know(page: Path) -> None:
    for block in blocks("sh", page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
            known = words and (words[0] in PROGRAMS or (words[0].startswith("scripts/") and (ROOT / words[0]).exists()))
            assert not words or known, line


PARSERS: dict[str, Callable[[str], object]] = {
    "json": msgspec.json.decode,
    "python": ast.parse,
    "yaml": yaml.safe_load,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}-{page.stem}")
def test_a_snippet_on_a_page_is_in_its_language(page: Path) -> None:
    for language, parse in PARSERS.items():
        for block in blocks(language, page.read_text()):
            assert parse(block) is not None
