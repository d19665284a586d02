"""The client alone: which commands end for want of an extra, and that all that they need is named by one."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from berth.cli.common import _MEANINGS, _POSTGRES_ERROR, _WORKER_ENDED, Exit, explain
from berth.cli.extras import ABSENT, EXTRAS, absent_extra
from berth.cli.main import COMMANDS
from bus.distribution import DISTRIBUTION

ROOT = Path(__file__).parents[3]
COMMAND_TIMEOUT_S = 120.0
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def module_of(requirement: str) -> str:
    name = re.split(r"[\[>]", requirement, maxsplit=1)[0]
    return name.lower().replace("-", "_").replace(".", "_")


MODULES = {
    module_of(one): extra
    for extra in EXTRAS
    for one in PROJECT["optional-dependencies"][extra]
    if not one.startswith(DISTRIBUTION)
}

# A process in which no module can be imported that only the extras bring, or that one of those needs.
ALONE = """
import json, sys
from importlib.abc import MetaPathFinder
absent = set(json.loads(sys.argv.pop(1)))
class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from berth.cli.main import main
main()
"""


def alone(*words: str, absent: tuple[str, ...] = tuple(MODULES)) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ALONE, json.dumps(absent), *words]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S, env={"COLUMNS": "80"}
    )


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_of_an_extra_is_known_by_its_distribution(module: str) -> None:
    assert importlib.util.find_spec(module) is not None, "imported under this name"
    fault = ModuleNotFoundError("gone", name=f"{module}.part")
    assert absent_extra(fault) == MODULES[module]
    stop = explain(fault)
    assert stop is not None and (stop.status, stop.code) == (Exit.USAGE, ABSENT)
    assert f"'{DISTRIBUTION}[{MODULES[module]}]'" in str(stop)


@pytest.mark.parametrize("module", ["berth.nothing", "pytest", "httpx", ""])
def test_another_absent_module_is_a_defect(module: str) -> None:
    assert absent_extra(ModuleNotFoundError("gone", name=module)) == ""
    assert explain(ModuleNotFoundError("gone", name=module)) is None


def test_the_client_alone_prints_its_version_and_lists_its_commands() -> None:
    assert alone("--version").returncode == 0
    shown = alone("--help")
    assert shown.returncode == 0, shown.stderr
    assert {line.split()[0] for line in shown.stdout.splitlines() if line.startswith("  ") and line.split()} >= {
        *COMMANDS
    }


@pytest.mark.parametrize("words", [("run", "scheduler"), ("run", "--help"), ("up",), ("db", "upgrade", "--any", "x")])
def test_a_command_without_its_extra_names_it_and_ends_with_2(words: tuple[str, ...]) -> None:
    done = alone(*words)
    assert (done.returncode, ABSENT in done.stderr, "Traceback" in done.stderr) == (Exit.USAGE, True, False), (
        done.stderr
    )


def test_an_import_while_a_command_runs_is_told_in_the_same_way() -> None:
    # Not in the modules of the commands: the pages need it.
    done = alone("serve", "web", absent=("jinja2",))
    assert (done.returncode, ABSENT in done.stderr) == (Exit.USAGE, True), done.stderr


def test_each_fault_that_is_known_by_its_name_exists() -> None:
    named = [kind for kind, _, _ in _MEANINGS if isinstance(kind, str)]
    for name in [*named, _WORKER_ENDED, _POSTGRES_ERROR]:
        module, _, attribute = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), attribute), BaseException)


def test_the_distribution_is_not_the_other_project() -> None:
    assert metadata.version(DISTRIBUTION) == PROJECT["version"]
    assert PROJECT["name"] == DISTRIBUTION != "berth"
