"""The commands in README and the pages are ones that berth takes: command lines,
settings, the request.
"""

from __future__ import annotations

import re
import shlex
import uuid
from pathlib import Path

import msgspec
import pytest
import typer

from berth.cli import app
from berth.settings import check_urls, read_settings
from bus.contracts.build import BuildRequest
from bus.persistence.address import parse_database_url
from bus.rabbitmq import parse_bus_url
from tests.kit.certificates import Authority
from tests.kit.documents import ROOT, blocks

README = (ROOT / "README.md").read_text()
KINDS = ("start", "operate", "use", "concepts", "contributing")
PAGES = [path.read_text() for kind in KINDS for path in sorted((ROOT / "docs" / kind).glob("*.md"))]


def indented(*pages: str) -> list[str]:
    """The code blocks that are marked by their indentation."""
    return [line[4:] for page in pages for line in page.splitlines() if line.startswith("    ")]


def command_lines() -> list[str]:
    """The lines of the pages that run `berth`, without prompt, comment and redirection."""
    typed = [block for kind in ("sh", "") for block in blocks(kind, README, *PAGES)] + indented(*PAGES)
    lines = [line for text in typed for line in text.replace("\\\n", " ").splitlines()]
    shown = [line for block in blocks("console", README, *PAGES) for line in block.replace("\\\n", " ").splitlines()]
    lines += [line[2:] for line in shown if line.startswith("$ ")]
    parts = [re.split(r"\s#|\s>|\s\|\s|\s&&\s", line)[0] for line in lines if "`" not in line]
    parts = [one for part in parts for one in re.split(r"; (?=berth )", part)]
    commands = [part.strip().removeprefix("PYTHONPATH=. ") for part in parts]
    return list(dict.fromkeys(line for line in commands if line.removeprefix(".venv/bin/").startswith("berth ")))


@pytest.mark.parametrize("line", command_lines())
def test_a_command_of_the_readme_is_understood(line: str) -> None:
    words = shlex.split(line.replace("UUID", str(uuid.UUID(int=1))))[1:]
    command = typer.main.get_command(app)
    context = command.make_context("berth", list(words))
    while hasattr(command, "resolve_command"):
        left = [*context._protected_args, *context.args]
        if not left and command.invoke_without_command:
            break
        name, command, words = command.resolve_command(context, left)
        assert command is not None and name is not None
        context = command.make_context(name, list(words), parent=context)


def test_the_settings_of_the_how_to_are_settings(tmp_path: Path) -> None:
    (text,) = blocks("toml", (ROOT / "docs" / "operate" / "deploy.md").read_text())
    path = tmp_path / "berth.toml"
    path.write_text(text)
    found = read_settings(path, {})
    assert (found.bus.url[:7], tuple(found.cells), found.database.url[:13]) == ("amqp://", ("cell1",), "postgresql://")


@pytest.mark.parametrize(("page", "scheme", "hosts"), [("tls", "amqps", 1), ("high-availability", "amqp", 3)])
def test_the_urls_of_a_how_to_are_urls(page: str, scheme: str, hosts: int, tmp_path: Path) -> None:
    (text,) = blocks("toml", (ROOT / "docs" / "operate" / f"{page}.md").read_text())
    authority = Authority(tmp_path, "ca")
    authority.issue("worker")
    path = tmp_path / "berth.toml"
    path.write_text(text.replace("/etc/berth/", f"{tmp_path}/"))
    found = read_settings(path, {})
    check_urls(found)
    for url in (found.bus.url, found.cells["cell1"].url):
        address = parse_bus_url(url)
        assert (address.scheme, len(address.hosts)) == (scheme, hosts)
    database = parse_database_url(found.database.url)
    assert (len(database.hosts) > 1) is (hosts > 1)
    assert database.target == "read-write"


def test_the_request_of_the_readme_is_a_request() -> None:
    (text,) = blocks("json", README)
    assert msgspec.json.decode(text, type=BuildRequest).flavor == "m1.small"


def test_what_the_readme_points_at_exists() -> None:
    for text in (README, (ROOT / "CONTRIBUTING.md").read_text()):
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (ROOT / target).exists(), target
        for script in re.findall(r"`(scripts/[\w-]+)", text):
            assert (ROOT / script).exists(), script
