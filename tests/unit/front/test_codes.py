"""Every code that a reply, event, command or log line can carry has a cause and a remedy, and each row is used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.contracts.placement import ClaimOutcome
from lab.reference.codes import PACKAGES, Code, table
from tests.kit import sources
from tests.kit.sources import FILES, FORMED, NO_CODES, codes_of, literals, logged_in, of_package

MAX_WORDS = 45  # of a cause and a remedy together
REFERENCE = sources.ROOT / "docs" / "reference"
# In a remedy: a command of berth, a setting, a page.
COMMAND = re.compile(r"`berth ([a-z][a-z -]*)")
SETTING = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]*)?`")
PAGE = re.compile(r'docs/[\w/-]+\.md(?:, "([^"]+)")?')


@pytest.fixture(scope="module", autouse=True)
def read_once() -> Iterator[None]:
    """The sources are read for the first test that looks at them, and forgotten after the last."""
    yield
    sources.forget()


def rows() -> dict[str, Code]:
    return {name: one for package in PACKAGES for name, one in table(package).items()}


def test_every_code_has_a_row() -> None:
    known = rows()
    missing = {code: place for package in PACKAGES for code, place in of_package(package).items() if code not in known}
    assert missing == {}, "a row in codes.toml of its package; or, if it is no code, NO_CODES of tests/kit/sources.py"


def test_every_log_line_from_warning_up_has_a_row_of_its_kind() -> None:
    known = rows()
    wrong = {
        name: sources.where(path, line)
        for path in sources.sources(*PACKAGES)
        for name, line in logged_in(path)
        if name not in known or "log" not in known[name].kind
    }
    assert wrong == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_row_is_used_by_its_package(package: str) -> None:
    used = of_package(package).keys() | literals(package)
    assert sorted(table(package).keys() - used) == []


def test_outcomes_of_claims_have_rows() -> None:
    """An attempt that was not claimed has the outcome as its code."""
    assert sorted(set(ClaimOutcome) - {ClaimOutcome.CLAIMED} - rows().keys()) == []


def test_a_code_has_one_row() -> None:
    assert len(rows()) == sum(len(table(package)) for package in PACKAGES)


def test_what_is_no_code_is_there() -> None:
    """An entry of NO_CODES or FORMED that the sources do not have any more would hide a code of that name."""
    texts = {text for package in PACKAGES for text in literals(package)}
    plain = {text for text in NO_CODES if "*" not in text}
    assert sorted(plain - texts) == []
    known = rows()
    assert sorted(code for formed in FORMED.values() for code in formed if code not in known) == []


def test_rows_are_sorted_and_short() -> None:
    wrong = [
        name
        for package in PACKAGES
        for name, one in table(package).items()
        if not one.kind
        or not (one.cause.endswith(".") and one.remedy.endswith("."))
        or "|" in one.cause + one.remedy
        or len((one.cause + " " + one.remedy).split()) > MAX_WORDS
    ]
    assert wrong == []
    assert [package for package in PACKAGES if list(table(package)) != sorted(table(package))] == []


def test_a_remedy_is_there() -> None:
    """The commands, settings and pages that rows name."""
    headings = re.findall(r"^## `berth ([^`]+)`", (REFERENCE / "commands.md").read_text(), re.MULTILINE)
    commands = {*headings, *(name.partition(" ")[0] for name in headings)}  # `berth hosts` is a command, and a group
    settings = _settings()
    sections = {one.partition(".")[0] for one in settings}
    known = settings | rows().keys()
    wrong: list[str] = []
    for name, one in rows().items():
        for text in (one.cause, one.remedy):
            for found in COMMAND.findall(text):
                words = found.split(" -")[0].split()
                if " ".join(words[:2]) not in commands and words[0] not in headings:
                    wrong.append(f"{name}: no command {found}")
            wrong += [
                f"{name}: no setting {setting}"
                for setting in SETTING.findall(text)
                if setting.partition(".")[0] in sections and setting not in known and not FILES.search(setting)
            ]
            for found in PAGE.finditer(text):
                page = sources.ROOT / found.group().partition(",")[0]
                if not page.is_file() or (found[1] and f"## {found[1]}\n" not in page.read_text()):
                    wrong.append(f"{name}: no page {found.group()}")
    assert wrong == []


def _settings() -> set[str]:
    """The settings and sections of docs/reference/settings.md, with their sections' names."""
    found: set[str] = set()
    section = ""
    for line in (REFERENCE / "settings.md").read_text().splitlines():
        if heading := re.match(r"## `\[([\w.]+)", line):
            name = heading[1].removesuffix(".NAME").rstrip(".")
            section = name + "."
            found.add(name)
        elif setting := re.match(r"\| `(\w+)` \|", line):
            found.add(section + setting[1])
    return found


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ('raise Stop(1, "planted.code", "text")', "planted.code"),
        ('Refusal(code="planted.code", reason="")', "planted.code"),
        ('PLANTED = "planted.code"', "planted.code"),
        ('class Planted(Fault):\n    code = "planted"', "planted"),
        ('log.warning("planted.code", of=1)', "planted.code"),
        ('log.error(f"planted.{state}")', "planted.*"),
        ('rejected = {host: f"{kind}.planted"}', "*.planted"),
        ('code = "planted.code" if one else other', "planted.code"),
        ('from bus.key_trust import BROKERS\nEXPIRED = f"{BROKERS}planted"', "broker.planted"),
    ],
)
def test_a_planted_code_is_found(source: str, code: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(source)
    assert [found for found, _ in codes_of(path)] == [code]
    assert code not in rows()


@pytest.mark.parametrize(
    "source",
    [
        'log = structlog.get_logger("planted.logger")',
        'log.info("planted.line")',
        'path = folder / "planted.part"',
        'class Planted(Message, tag="planted.message.v1"):\n    pass',
    ],
)
def test_what_its_place_shows_to_be_no_code_is_none(source: str, tmp_path: Path) -> None:
    path = tmp_path / "planted.py"
    path.write_text(source)
    assert ast.parse(source)
    assert list(codes_of(path)) == []
