"""A mutant of scripts/mutation is found by a test, hangs, or survives, and none survives because it hangs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.mutation import __main__ as mutation
from tests.mutation.__main__ import CannotCheck, Copy, Outcome, Verdict

DOMAIN = "one/domain/__init__.py"
TESTS = ("tests/unit/one", "tests/contract")
RULE = "def rule(number):\n    return number > 3\n"
PROCESSOR_S = 60.0


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Copy:
    """Of a clone of one rule, its unit test, and a contract test that looks at less."""
    clone, place = tmp_path / "clone", tmp_path / "copy"
    texts = {
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\nmarkers = ["postgres", "rabbitmq"]\n',
        DOMAIN: RULE,
        "tests/unit/one/test_rule.py": "from one.domain import rule\ndef test_it():\n    assert rule(5) > rule(1)\n",
        "tests/contract/test_port.py": "from one.domain import rule\ndef test_four():\n    assert rule(4)\n",
    }
    for name, text in texts.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(clone)], check=True)
    monkeypatch.setattr(mutation, "ROOT", clone)
    return Copy(place)


def test_each_mutant_is_killed_hung_or_survives_and_the_copy_is_as_it_was(copy: Copy) -> None:
    def verdict(source: str, processor_s: float = PROCESSOR_S) -> Verdict:
        return copy.check(DOMAIN, source, TESTS, processor_s)

    assert verdict(RULE.replace("> 3", "< 3")) == (Outcome.KILLED, TESTS[0])
    assert verdict(RULE.replace("> 3", "> 2")) == (Outcome.SURVIVED, "")
    assert verdict("def rule(number):\n    while True:\n        pass\n", 1.0) == (Outcome.HUNG, TESTS[0])
    assert (copy.place / DOMAIN).read_text() == RULE


def test_a_mutant_that_waits_without_the_processor_is_hung(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutation, "LONGEST_WAIT_S", 0.1)
    assert copy.check(DOMAIN, RULE, TESTS, PROCESSOR_S).outcome is Outcome.HUNG


def test_tests_that_fail_without_a_mutant_and_tests_that_pass_with_any_check_nothing(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutation, "TESTS_OF", {"one": TESTS[:1]})
    (copy.place / "tests/unit/one/test_rule.py").write_text("def test_it():\n    assert False\n")
    with pytest.raises(CannotCheck, match="fails without a mutant"):
        mutation.bounds(copy, ["one"])
    (copy.place / "tests/unit/one/test_rule.py").write_text("def test_it():\n    assert True\n")
    with pytest.raises(CannotCheck, match="do not import it"):
        mutation.bounds(copy, ["one"])
