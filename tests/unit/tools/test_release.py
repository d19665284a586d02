"""Scripts that release and deploy."""

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

# --- `scripts/release` in a scratch repository: what holds, and what each mistake breaks


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
    assert install[-1] == "/src[server]"  # without a PostgreSQL
    (entry,) = [text for name, text in instructions() if name == "ENTRYPOINT"]
    assert Path(yaml.safe_load(entry)[0]).name in project["project"]["scripts"]
    assert ("USER", "berth") in instructions()


def test_each_service_of_the_compose_file_is_a_command_and_has_settings_that_are_read() -> None:
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    ours = {name: service for name, service in services.items() if service["image"] == "berth"}
    assert ours.keys() == {"placement", "conductor", "compute", "scheduler", "web"}
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
