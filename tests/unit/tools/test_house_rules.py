"""Each rule about words and docstrings fails on a planted violation, and passes on the same text without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import test_house
from tests.kit import sources as kit

# (the rule, the file, the violation, the same without it)
PLANTED: dict[str, tuple[Callable[[], None], str, str, str]] = {
    "prose: no role": (
        test_house.test_prose_names_the_role,
        "bus/one.py",
        '"""Whoever asked lets go of it."""',
        '"""The scheduler drops the claim."""',
    ),
    "comment: no role": (
        test_house.test_prose_names_the_role,
        "bus/one.py",
        "# nobody waits for it",
        "# no client waits for it",
    ),
    "page: no role": (
        test_house.test_prose_names_the_role,
        "docs/one.md",
        "Somebody has to look.",
        "An operator has to look.",
    ),
    "test: no role": (
        test_house.test_prose_names_the_role,
        "tests/one.py",
        "# everybody is asked",
        "# every worker is asked",
    ),
    "docstring: a conversation": (
        test_house.test_prose_has_no_conversation,
        "bus/one.py",
        '"""Placement says no."""',
        '"""Placement refuses."""',
    ),
    "message: a conversation": (
        test_house.test_prose_has_no_conversation,
        "bus/one.py",
        'log.info("x", why="the host was told to stop")',
        'log.info("x", why="the host was commanded to stop")',
    ),
    "page: a conversation": (
        test_house.test_prose_has_no_conversation,
        "docs/one.md",
        "The cell is told to stop.",
        "The cell is commanded to stop.",
    ),
    "command: a conversation": (
        test_house.test_prose_has_no_conversation,
        "scripts/steps/one",
        "# it tells the broker",
        "# it notifies the broker",
    ),
    "docstring: no subject": (
        test_house.test_a_sentence_begins_with_its_subject,
        "bus/one.py",
        '"""What a claim names."""',
        '"""The rows that a claim names."""',
    ),
    "comment: no subject in its second sentence": (
        test_house.test_a_sentence_begins_with_its_subject,
        "tests/one.py",
        "# It is late. What is late is dropped.",
        "# It is late. A late message is dropped.",
    ),
    "page: no subject": (
        test_house.test_a_sentence_begins_with_its_subject,
        "docs/one.md",
        "Those in quarantine are reserved.",
        "Machines in quarantine are reserved.",
    ),
    "name: a function": (
        test_house.test_no_private_word_for_what_the_field_has_a_name_for,
        "bus/one.py",
        "def bury(letter): ...",
        "def dead_letter(letter): ...",
    ),
    "name: a constant": (
        test_house.test_no_private_word_for_what_the_field_has_a_name_for,
        "bus/one.py",
        "MAX_ASKED = 1",
        "MAX_REQUESTED = 1",
    ),
    "name: a class": (
        test_house.test_no_private_word_for_what_the_field_has_a_name_for,
        "bus/one.py",
        "class HostTold: ...",
        "class HostNotified: ...",
    ),
    "docstring: none": (
        test_house.test_what_is_public_is_described,
        "bus/one.py",
        '"""A module."""\ndef run(): ...',
        '"""A module."""\ndef run():\n    """Run."""',
    ),
    "docstring: a field that is not there": (
        test_house.test_a_docstring_of_a_class_names_fields_that_it_has,
        "bus/one.py",
        'class One:\n    """One. lost: how many."""\n    found = 1',
        'class One:\n    """One. found: how many."""\n    found = 1',
    ),
    "docstring: silent about its error": (
        test_house.test_a_docstring_names_what_is_raised,
        "bus/one.py",
        'def run():\n    """Run."""\n    if not 1:\n        raise BusError("no")',
        'def run():\n    """Run. Raises BusError."""\n    if not 1:\n        raise BusError("no")',
    ),
    "docstring: a number without its unit": (
        test_house.test_a_number_has_its_unit_in_its_name_or_docstring,
        "bus/one.py",
        'def wait(time: float):\n    """Wait."""',
        'def wait(time_s: float):\n    """Wait."""',
    ),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_rule_finds_what_breaks_it(plant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, name, wrong, right = PLANTED[plant]
    for folder in ("scripts/steps", "docs", "bus", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text("# A project\n")
    (tmp_path / "CONTRIBUTING.md").write_text("# Tasks\n")

    def sources(*packages: str) -> list[Path]:
        return sorted(path for package in packages for path in (tmp_path / package).rglob("*.py"))

    for module in (test_house, kit):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(test_house, "sources", sources)
    file = tmp_path / name
    for text, is_wrong in ((wrong, True), (right, False)):
        file.write_text(text + "\n")
        kit.parsed.cache_clear()
        kit.nodes.cache_clear()
        if is_wrong:
            with pytest.raises(AssertionError, match="one"):
                rule()
        else:
            rule()
