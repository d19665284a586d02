"""The files of `deploy/` are accepted by the programs that read them."""

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

from berth.cli import app
from berth.settings import read_settings
from berth.trial.worker_processes import STALL_S

ROOT = Path(__file__).parents[3]
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
    """The units, with a program that exists on this machine."""
    for path in SYSTEMD.iterdir():
        text = path.read_text().replace(PROGRAM, sys.executable)
        (tmp_path / path.name.replace("@.", "@cell1.")).write_text(text)
    return tmp_path


def analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
    )


def test_there_is_a_unit_for_each_role() -> None:
    roles = {"placement", "scheduler", "conductor", "compute", "ironic-sync", "web"}
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
    extras = install[-1].partition("[")[2].rstrip("]").split(",")
    assert set(extras) <= project["project"]["optional-dependencies"].keys()
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
