"""Each rule about docstrings fails on a planted violation, and passes on the same text without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import test_house
from tests.kit import sources as kit

# (the rule, the file, the violation, the same without it)
PLANTED: dict[str, tuple[Callable[[], None], str, str, str]] = {
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
    for folder in ("scripts", "docs", "bus", "tests"):
        (tmp_path / folder).mkdir()
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
