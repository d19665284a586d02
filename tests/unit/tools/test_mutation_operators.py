"""The mutants that scripts/mutation draws, by mutmut's own interpreter: once it is installed, as the script does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".berth" / "mutmut" / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="scripts/mutation installs mutmut")


def mutants(path: Path, text: str) -> list[str]:
    """The changed lines of each mutant; none where they are gone."""
    path.write_text(text)
    command = [PYTHON, ROOT / "tests" / "mutation" / "drawn.py", path, "--seed", "1", "--mutants", "1000"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    drawn = json.loads(done.stdout)
    assert drawn["there"] == len(drawn["drawn"])
    for one in drawn["drawn"]:
        compile(one["source"], "a mutant", "exec")
    return sorted(one["after"].strip() for one in drawn["drawn"])


def test_each_operand_and_each_arm_has_a_mutant(tmp_path: Path) -> None:
    text = "def f(a, b, c):\n    if a and b and c:\n        return [x for x in a if x]\n    return b if c else a\n"
    assert mutants(tmp_path / "one.py", text) == sorted(
        [
            *("if b and c:", "if a and c:", "if a and b:"),
            *("if a or b and c:", "if a and b or c:"),
            *("if (a and b and c) and False:", "if (a and b and c) or True:"),
            *("return [x for x in a if (x) and False]", "return [x for x in a if (x) or True]"),
            *("return b if (c) and False else a", "return b if (c) or True else a"),
        ]
    )


def test_each_case_guard_and_alternative_has_a_mutant_and_an_assertion_none(tmp_path: Path) -> None:
    head = "def f(a, b):\n    assert a and b\n    match a:\n        "
    text = f"{head}case int() | str() if b:\n            return a\n        case _:\n            return b\n"
    assert mutants(tmp_path / "one.py", text) == sorted(
        [
            *("case int() if b:", "case str() if b:"),
            *("case int() | str() if (b) and False:", "case int() | str() if (b) or True:"),
            *("", ""),  # without each case
        ]
    )
