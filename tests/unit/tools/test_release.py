"""Scripts that set up, release and deploy."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from berth.cli.main import app
from berth.config.settings import read_settings
from berth.up.worker_processes import STALL_S
from tests.release import ANCHOR, findings, git

# --- `scripts/nightly release` in a scratch repository: what holds, and what each mistake breaks


VERSION = "0.2.0"
SCHEMA = "placement_worker/store/tables.py"
MIGRATIONS = "placement_worker/store/migrations/versions"


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def commit(root: Path) -> str:
    git(root, "add", "--all")
    author = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    git(root, *author, "commit", "-q", "--allow-empty", "--message", "Change")
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A commit that is ready to be 0.2.0, after a release 0.1.0."""
    root = tmp_path / "clone"
    root.mkdir()
    git(root, "init", "-q")
    packages = '[tool.setuptools.packages.find]\ninclude = ["placement_worker*"]\n'
    write(root, "pyproject.toml", f'[project]\nname = "berth"\nversion = "0.1.0"\n{packages}')
    write(root, "CHANGELOG.md", "# Changelog\n\n## 0.1.0 (2026-01-01)\n\nOld.\n")
    write(root, "changelog.d/.gitignore", "!.gitignore\n")
    write(root, SCHEMA, "one")
    write(root, f"{MIGRATIONS}/0001_initial.py", "METADATA")
    write(root, ANCHOR, f"{commit(root)}\n")
    commit(root)
    git(root, "tag", "v0.1.0")
    write(root, "pyproject.toml", f'[project]\nname = "berth"\nversion = "{VERSION}"\n{packages}')
    write(root, "CHANGELOG.md", f"# Changelog\n\n## {VERSION} (2026-02-01)\n\nNew.\n\n## 0.1.0 (2026-01-01)\n\nOld.\n")
    write(root, SCHEMA, "two")
    write(root, f"{MIGRATIONS}/0002_more.py", "two")
    commit(root)
    return root


def broken(root: Path, version: str = VERSION) -> list[str]:
    return [one.what for one in findings(root, version) if not one.holds]


def test_a_commit_on_which_all_agree_is_a_release(clone: Path) -> None:
    assert broken(clone) == []


FIRST, SECOND = f"{MIGRATIONS}/0001_initial.py", f"{MIGRATIONS}/0002_more.py"


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("changelog.d/thing.added.md", "A thing.\n", "no fragment of the changelog is left"),
        (
            "CHANGELOG.md",
            f"# Changelog\n\n## {VERSION} (not released yet)\n",
            "CHANGELOG.md begins with it and its day",
        ),
        ("pyproject.toml", '[project]\nname = "berth"\nversion = "0.1.9"\n', "pyproject.toml has it"),
        (FIRST, "METADATA, and another", "no released migration is another"),
        (FIRST, None, "no released migration is another"),
        (SECOND, None, "each changed schema has a migration"),
    ],
)
def test_each_mistake_that_is_committed_is_found(clone: Path, path: str, text: str | None, found: str) -> None:
    if text is None:
        (clone / path).unlink()
    else:
        write(clone, path, text)
    commit(clone)
    assert broken(clone) == [found]


def test_a_tree_that_is_not_the_commit_and_a_version_that_has_a_tag_are_found(clone: Path) -> None:
    git(clone, "tag", f"v{VERSION}", "v0.1.0")
    assert broken(clone) == ["no tag has it", "it is above the last release"]
    git(clone, "tag", "--delete", f"v{VERSION}")
    write(clone, SCHEMA, "three")
    assert broken(clone) == ["the tree is the commit"]


@pytest.mark.parametrize("version", ["0.1.0", "0.0.9", "v0.2.0", "0.2", "0.2.0rc1"])
def test_a_version_that_is_not_the_next_is_refused(clone: Path, version: str) -> None:
    assert broken(clone, version)


ROOT = Path(__file__).parents[3]
BASH = "/bin/bash"


# --- the one way to make a virtualenv (scripts/virtualenv), with a Python that notes what it is started for


# It makes a virtualenv as Python does, its own interpreter in it under another name.
PYTHON = """#!/bin/sh
case "$*" in
"-c import ensurepip, venv") exit ${NO_ENSUREPIP:-0} ;;
-c*) exit 0 ;;
"-m pip --version") exit 0 ;;
"-m pip install"*) echo "install $*" >>"$NOTES"; exit ${PIP_FAILS:-0} ;;
"-m venv "*)
    echo "make $3" >>"$NOTES"
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    printf '#!%s/bin/python3\\n' "$PWD/$3" >"$3/bin/pip" ;;
*) exit 9 ;;
esac
"""
STUBS = 'report() { echo "$*"; }; give_up() { echo "$*"; exit 2; }; apt_install() { return 1; }'
UV = '#!/bin/sh\nfor place; do :; done\necho "uv $place" >>"$NOTES"\nexec "$BASE" -m venv "$place"\n'


class Clone:
    """A folder with a Python to make virtualenvs with."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bin").mkdir(parents=True)
        (root / "tests").mkdir()
        (root / "tests" / "requirements.txt").write_text("one==1\n")
        self.program("base", PYTHON)

    def program(self, name: str, text: str) -> None:
        path = self.root / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def run(self, command: str, **env: str) -> subprocess.CompletedProcess[str]:
        script = f"root={self.root}; {STUBS}; . {ROOT}/scripts/virtualenv; {command}"
        base = str(self.root / "bin" / "base")
        return subprocess.run(
            [BASH, "-euo", "pipefail", "-c", script],
            cwd=self.root, capture_output=True, text=True, timeout=60, check=False,
            env={"PATH": f"{self.root}/bin:/usr/bin:/bin", "NOTES": str(self.root / "notes"), "BASE": base, **env},
        )  # fmt: skip

    def made(self, wanted: str = "one", **env: str) -> list[str]:
        """What a virtualenv of this content takes: the first words of what was started."""
        done = self.run(f"virtualenv place bin/base it {wanted} -e .", **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return self.notes()

    def notes(self) -> list[str]:
        path = self.root / "notes"
        found = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return [line.split()[0] for line in found]


@pytest.fixture
def virtualenv_clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone")


def test_it_is_made_once(virtualenv_clone: Clone) -> None:
    assert virtualenv_clone.made() == ["make", "install"]
    assert virtualenv_clone.made() == []


def test_another_content_is_installed_into_the_one_that_is_there(virtualenv_clone: Clone) -> None:
    """Where pip names its interpreter `python3`, as that of a pyenv does, .venv was made anew for each change."""
    virtualenv_clone.made()
    assert virtualenv_clone.made("two") == ["install"]


def test_one_that_was_moved_and_one_without_its_interpreter_are_made_anew(
    virtualenv_clone: Clone, tmp_path: Path
) -> None:
    virtualenv_clone.made()
    virtualenv_clone.root = virtualenv_clone.root.rename(tmp_path / "moved")
    assert virtualenv_clone.made() == ["make", "install"]
    (virtualenv_clone.root / "place" / "bin" / "python").unlink()
    assert virtualenv_clone.made() == ["make", "install"]


def test_one_that_pip_did_not_finish_is_not_taken_as_made(virtualenv_clone: Clone) -> None:
    done = virtualenv_clone.run("virtualenv place bin/base it one -e .", PIP_FAILS="1")
    assert (done.returncode, "pip could not install it" in done.stdout) == (2, True)
    virtualenv_clone.notes()
    assert virtualenv_clone.made() == ["install"]


def test_a_tool_has_its_requirements_and_its_constraints(virtualenv_clone: Clone) -> None:
    """Of an absolute path, which a program that changes its directory can be given."""
    (virtualenv_clone.root / ".venv").symlink_to("bin")
    virtualenv_clone.program("python", PYTHON)
    (virtualenv_clone.root / "bin" / "bin").symlink_to(".")

    def made() -> tuple[str, str]:
        done = virtualenv_clone.run('tool name tests "a tool"; echo "$tool"')
        assert done.returncode == 0, done.stdout + done.stderr
        notes = virtualenv_clone.root / "notes"
        text = notes.read_text() if notes.exists() else ""
        notes.unlink(missing_ok=True)
        return done.stdout.splitlines()[-1], text

    place, notes = made()
    assert place == str(virtualenv_clone.root / ".berth" / "name") and notes.endswith("-r tests/requirements.txt\n")
    assert made() == (place, "")
    (virtualenv_clone.root / "tests" / "constraints.txt").write_text("two==2\n")
    assert "-c tests/constraints.txt -r tests/requirements.txt" in made()[1]


def test_without_ensurepip_uv_makes_it_for_a_tool_too(virtualenv_clone: Clone) -> None:
    """The tools' virtualenvs were made by `python -m venv` alone, which needs python3-venv on Debian."""
    virtualenv_clone.program("uv", UV)
    assert virtualenv_clone.made(NO_ENSUREPIP="1") == ["uv", "make", "install"]


def test_where_none_can_be_made_the_reason_is_printed(virtualenv_clone: Clone) -> None:
    virtualenv_clone.program("base", PYTHON.replace('"-m pip --version") exit 0', '"-m pip --version") exit 1'))
    done = virtualenv_clone.run("virtualenv place bin/base it one -e .", NO_ENSUREPIP="1")
    assert (done.returncode, "install the package python3-venv" in done.stdout) == (2, True)


# --- the files of `deploy/` are accepted by the programs that read them


SYSTEMD = ROOT / "deploy" / "systemd"
SERVICES = sorted(SYSTEMD.glob("*.service"))
PROGRAM = "/opt/berth/bin/berth"
# systemd's own scale of exposure, times ten: above 50 it calls a service exposed.
MOST_EXPOSED = 20
COMMAND_TIMEOUT_S = 120

needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
needs_compose = pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not here")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units, with a program that exists on this computer."""
    for path in SYSTEMD.iterdir():
        text = path.read_text().replace(PROGRAM, sys.executable)
        (tmp_path / path.name.replace("@.", "@cell1.")).write_text(text)
    return tmp_path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
    )


def test_there_is_a_unit_for_each_role() -> None:
    roles = {
        "placement",
        "scheduler",
        "conductor",
        "compute",
        "ironic-sync",
        "gateway",
        "web",
        "nova",
        "nova-scheduler",
    }
    assert {path.name.removeprefix("berth-").removesuffix(".service").rstrip("@") for path in SERVICES} == roles


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_a_worker_that_stands_still_is_ended_and_restarted(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert f"WatchdogSec={STALL_S:g}" in lines and "Restart=on-failure" in lines  # a watchdog that ran out is a failure


@needs_systemd
@pytest.mark.parametrize("name", [path.name for path in SERVICES])
def test_systemd_accepts_the_unit_and_finds_it_hardened(installed: Path, name: str) -> None:
    unit = str(installed / name.replace("@.", "@cell1."))
    verified = analyze("verify", "--man=no", unit)
    assert (verified.returncode, [line for line in verified.stderr.splitlines() if str(installed) in line]) == (0, [])
    judged = analyze("security", "--offline=yes", f"--threshold={MOST_EXPOSED}", "--no-pager", unit)
    assert judged.returncode == 0, judged.stdout.splitlines()[-1:]


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_the_command_of_a_unit_is_one_of_ours(path: Path) -> None:
    (command,) = [line for line in path.read_text().splitlines() if line.startswith(f"ExecStart={PROGRAM} ")]
    arguments = shlex.split(command.removeprefix(f"ExecStart={PROGRAM} ").replace("%i", "cell1"))
    ran = CliRunner().invoke(app, [*arguments, "--help"])
    assert ran.exit_code == 0, ran.output
    for option in (one for one in arguments if one.startswith("--")):
        assert option in ran.output


def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments) of the Containerfile, in order."""
    lines = (ROOT / "deploy" / "Containerfile").read_text().splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line and not line.startswith("#")]


def test_the_image_has_every_package_and_installs_it_as_the_tests_do() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = [shlex.split(text) for name, text in instructions() if name == "COPY" and not text.startswith("--from")]
    sources = {source for *named, _ in copied for source in named}
    assert [source for source in sources if not (ROOT / source).exists()] == []
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages | {"pyproject.toml", "constraints.txt", project["project"]["readme"]} <= sources
    (install,) = [shlex.split(text) for name, text in instructions() if name == "RUN" and "pip install" in text]
    assert install[install.index("--constraint") + 1] == "/src/constraints.txt"
    assert install[-1] == "/src"  # without extras
    (entry,) = [text for name, text in instructions() if name == "ENTRYPOINT"]
    assert Path(yaml.safe_load(entry)[0]).name in project["project"]["scripts"]
    assert ("USER", "berth") in instructions()


def test_each_service_of_the_compose_file_is_a_command_and_has_settings_that_are_read() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    ours = {name: service for name, service in services.items() if service["image"] == "berth"}
    assert ours.keys() == {"placement", "conductor", "compute", "scheduler"}
    for service in ours.values():
        ran = CliRunner().invoke(app, [*service["command"], "--help"])
        assert ran.exit_code == 0, ran.output
        settings = read_settings(None, service["environment"])
        assert settings.bus.url == "amqp://berth:berth@rabbitmq:5672/"
        assert settings.database.url == "postgresql://berth:berth@postgres:5432/berth"
        assert list(settings.cells) == ["cell1"]


@needs_compose
def test_compose_accepts_the_file() -> None:
    command = ["docker-compose", "-f", str(ROOT / "deploy" / "compose.yaml"), "config", "--services"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert set(ran.stdout.split()) == {"rabbitmq", "postgres", "placement", "conductor", "compute", "scheduler"}
