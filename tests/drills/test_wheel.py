"""README's wheel, installed into empty virtualenvs outside of any clone: with [embedded] `berth up` and a life cycle;
without an extra the client, and what it brings.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.waiting import wait_until

ROOT = Path(__file__).parents[2]
COMMAND_TIMEOUT_S = 300.0
UP_TIMEOUT_S = 120.0

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


class Installed:
    """A virtualenv with the wheel and what its extra ("": none) names, from the index, and an empty home."""

    def __init__(self, place: Path, state: str, extra: str) -> None:
        self.home = place / "home"
        self.home.mkdir()
        self.bin = place / "venv" / "bin"
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "PATH"}
        # As root the state would be below /var/lib, where an earlier one may be; a socket's path must be short.
        self.env = {**kept, "HOME": str(self.home), "BERTH_STATE_DIR": state}
        self.run(
            sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(place / "dist"), self._sources(place)
        )
        self.run(sys.executable, "-m", "venv", str(self.bin.parent))
        (wheel,) = (place / "dist").glob("berth_scheduler-*.whl")
        constraints = str(ROOT / "constraints.txt")
        self.run(str(self.bin / "pip"), "install", "-q", "-c", constraints, f"{wheel}{extra}")

    def run(self, *command: str) -> str:
        """Run a command in the empty home; returns its output."""
        done = subprocess.run(
            command, cwd=self.home, env=self.env, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def berth(self, *words: str) -> str:
        """What `berth` prints there."""
        return self.run(str(self.bin / "berth"), *words)

    def _sources(self, place: Path) -> str:
        """The files that git has, so that no build of a developer is in the wheel."""
        tree = place / "tree"
        tree.mkdir()
        list_files = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        files = subprocess.run(list_files, cwd=ROOT, capture_output=True, check=True).stdout
        archive = ["tar", "--create", "--null", "--files-from=-", "--ignore-failed-read"]
        packed = subprocess.run(archive, cwd=ROOT, input=files, capture_output=True, check=True).stdout
        subprocess.run(["tar", "--extract", "--directory", str(tree)], input=packed, check=True)
        return str(tree)


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[Installed]:
    with tempfile.TemporaryDirectory(prefix="berth-") as state:
        Path(state).chmod(0o755)  # PostgreSQL runs as another user where this is root
        yield Installed(tmp_path, state, "[embedded]")


def test_a_wheel_in_an_empty_virtualenv_runs_a_whole_berth(installed: Installed) -> None:
    up = subprocess.Popen(
        [str(installed.bin / "berth"), "up", "-o", "json"],
        cwd=installed.home, env=installed.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        wait_until(lambda: status_of(installed, "host", "list", "-o", "json") == 0, UP_TIMEOUT_S)
        built = json.loads(installed.berth("boot", "--flavor", "m1.small", "--count", "5", "--wait", "-o", "json"))[
            "items"
        ]
        assert [one["state"] for one in built] == ["active"] * 5
        assert len(listed(installed)) == 5
        installed.berth("delete", built[0]["instance_uuid"], "--wait", "--yes")
        assert built[0]["instance_uuid"] not in {one["instance_uuid"] for one in listed(installed)}
        installed.berth("check")
    finally:
        up.send_signal(signal.SIGINT)
        up.communicate(timeout=COMMAND_TIMEOUT_S)
    assert "lab" not in {path.name for path in installed.bin.parent.glob("lib/python*/site-packages/*")}


def listed(installed: Installed) -> list[dict[str, str]]:
    found = json.loads(installed.berth("list", "-o", "json"))["items"]
    return [one for one in found if one["state"] == "active"]


# What a person's computer gets for a token and an address.
MAX_PACKAGES = 22
MAX_MB = 40
NOT_OF_A_CLIENT = {"aio-pika", "aiormq", "alembic", "asyncpg", "authlib", "numpy", "sqlalchemy", "uvloop"}


def test_the_client_alone_is_small_and_names_the_extra_of_what_it_lacks(tmp_path: Path) -> None:
    client = Installed(tmp_path, str(tmp_path), "")
    listed = json.loads(client.run(str(client.bin / "pip"), "list", "--format", "json"))
    packages = {one["name"].lower().replace("_", "-") for one in listed} - {"pip", "setuptools"}
    assert "berth-scheduler" in packages
    assert len(packages) <= MAX_PACKAGES and not packages & NOT_OF_A_CLIENT, packages
    (site,) = client.bin.parent.glob("lib/python*/site-packages")
    theirs = ("pip", "setuptools", "pkg_resources", "_distutils_hack")  # of the virtualenv itself
    files = [path for path in site.rglob("*") if path.is_file() and not path.parts[len(site.parts)].startswith(theirs)]
    # Without the bytecode that pip writes for whom it likes.
    assert sum(path.stat().st_size for path in files if path.suffix != ".pyc") <= MAX_MB * 1e6
    client.berth("--version")
    client.berth("--help")
    done = subprocess.run(
        [str(client.bin / "berth"), "run", "scheduler"],
        cwd=client.home,
        env=client.env,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2 and b"command.extra_absent" in done.stderr and b"Traceback" not in done.stderr


def status_of(installed: Installed, *words: str) -> int:
    command = [str(installed.bin / "berth"), *words]
    return subprocess.run(command, cwd=installed.home, env=installed.env, capture_output=True, check=False).returncode
