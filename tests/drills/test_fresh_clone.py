"""The commands of README's first lines, in a clone that only its owner may enter: as root, and as another user.

A clone in root's home lies below a directory of mode 0700, and PostgreSQL runs as a user who may not enter it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from berth.up.embedded.process import Account

ROOT = Path(__file__).parents[2]
SITE_PACKAGES = Path(pytest.__file__).parents[1]
PYTHON: str = sys._base_executable  # type: ignore[attr-defined]  # what this virtualenv was made with
STAMP = "cat pyproject.toml constraints.txt scripts/virtualenv | cksum; pwd"  # as scripts/virtualenv makes it
COMMAND_TIMEOUT_S = 300.0

pytestmark = [pytest.mark.system, pytest.mark.postgres, pytest.mark.rabbitmq, pytest.mark.timeout(600)]


class Clone:
    """A copy of the tracked files with a virtualenv of its own, as scripts/setup would have made it."""

    def __init__(self, home: Path, temporary: Path, account: Account) -> None:
        self.path = home / "berth"
        self.temporary = temporary
        self._home = home
        self._account = account
        self._copy_tracked_files()
        self._make_virtualenv()
        if account.name is not None:
            for place in (home, *home.rglob("*")):
                if place.is_dir() and not place.is_symlink():  # files may be links to those of this virtualenv
                    account.own(place)
        stamp = subprocess.run(["bash", "-c", STAMP], cwd=self.path, capture_output=True, check=True).stdout
        (self.path / ".venv" / "berth.stamp").write_bytes(stamp)

    def run(self, *command: str) -> str:
        """Run a command there as its owner; returns what it wrote."""
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                command,
                cwd=self.path,
                env={"PATH": os.environ["PATH"], "HOME": str(self._home), "TMPDIR": str(self.temporary)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
                **self._account.popen_arguments(),  # type: ignore[call-overload]
            )
            output.seek(0)
            text = output.read()
        assert done.returncode == 0, text
        return text

    def _copy_tracked_files(self) -> None:
        listed = subprocess.run(
            ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.path / name)

    def _make_virtualenv(self) -> None:
        """The packages installed here, without pip: an installation from the network would take minutes."""
        place = self.path / ".venv"
        subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(place)], check=True)
        packages = next(place.glob("lib/python*/site-packages"))
        ours = shutil.ignore_patterns("__editable__*")  # what is compiled stays beside its source, as pip leaves it
        shutil.copytree(SITE_PACKAGES, packages, copy_function=link, ignore=ours, dirs_exist_ok=True, symlinks=True)
        (packages / "berth.pth").write_text(f"{self.path}\n")


def link(source: str, target: str) -> None:
    """Make a file of the clone; as a link, where that is possible and every user may read it."""
    try:
        if os.stat(source).st_mode & stat.S_IROTH:
            return os.link(source, target)
    except OSError:  # another file system
        pass
    shutil.copy2(source, target)
    os.chmod(target, 0o755)


def runs(account: Account, program: str) -> bool:
    """Whether an account may run a program."""
    with contextlib.suppress(PermissionError):
        subprocess.run([program, "--version"], cwd="/", check=True, **account.popen_arguments())  # type: ignore[call-overload]
        return True
    return False


@pytest.fixture(params=["root", "another user"])
def clone(request: pytest.FixtureRequest) -> Iterator[Clone]:
    is_root = os.geteuid() == 0
    if request.param == "root" and not is_root:
        pytest.skip("only root can run a command as root")
    account = Account() if request.param == "root" else Account(("nobody",))
    if not runs(account, PYTHON):
        pytest.skip(f"{account.name} may not run {PYTHON}")
    with (
        tempfile.TemporaryDirectory(prefix="berth-home-") as home,
        tempfile.TemporaryDirectory(prefix="berth-tmp-") as temporary,
    ):
        Path(temporary).chmod(0o1777)  # for every user, as /tmp is
        yield Clone(Path(home), Path(temporary), account)


def test_the_commands_of_the_readme_run_in_a_clone_below_a_private_directory(clone: Clone) -> None:
    assert stat.S_IMODE(clone.path.parent.stat().st_mode) == 0o700
    clone.run("scripts/demo", "--json", "demo.json")
    demo = json.loads((clone.path / "demo.json").read_text())
    assert demo["requests"] == demo["active"] + demo["failed"] == 1000
    assert all(demo["invariants"].values())
    # The first steps of scripts/test: a private RabbitMQ and a private PostgreSQL.
    output = clone.run(".venv/bin/python", "-m", "berth.up.embedded", "--", "printenv", "DATABASE_URL", "AMQP_URL")
    assert output.startswith("postgresql://") and "amqp://" in output
    assert not [*clone.temporary.glob("berth-pg-*"), *clone.temporary.glob("berth-mq-*")], "servers leave nothing"
