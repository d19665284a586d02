"""Every fenced block of the documents is of a language that some test takes, and its text is right in that language."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec
import pytest
import yaml
from jsonschema import Draft202012Validator
from starlette.routing import Match, Route

from berth.commands.objects import SECTIONS, read_file
from berth.settings import read_settings
from berth.web.access import read_tokens
from berth.web.api import API_ROOT, WebApi
from berth.web.openapi import document
from berth.web.operations import WebDrains, WebMoves, WebOperations
from bus.contracts.build import BuildRequest
from bus.contracts.catalogue import MESSAGES
from bus.contracts.objects import ObjectsChange
from scheduler_worker.domain.objects import ChangePlan, plan
from tests.kit.documents import PAGES, ROOT, blocks_of_all_pages, typed

# Of each language, what takes its blocks. "": prose in columns and output; mermaid and toctree: the site's build.
TAKEN_BY = {
    "": "test_readme.py, its lines of berth",
    "console": "this file; test_readme.py, its lines of berth",
    "ini": "tests/integration/test_tls.py, by a broker",
    "json": "this file",
    "mermaid": "test_docs.py",
    "python": "this file; the tests of the tutorials",
    "sh": "this file; test_readme.py, its lines of berth",
    "sql": "tests/integration/test_documented_sql.py, by PostgreSQL",
    "toml": "this file",
    "yaml": "this file",
    "{toctree}": "test_docs.py",
}
# The programs that a reader runs beside berth's own commands.
PROGRAMS = {
    ".venv/bin/berth",
    ".venv/bin/python",
    "berth",
    "cp",
    "createdb",
    "ln",
    "pg_dump",
    "pg_restore",
    "podman",
    "podman-compose",
    "ps",
    "python3",
    "rabbitmqctl",
    "systemctl",
}
SCRIPTS = [*blocks_of_all_pages("sh"), *((where, typed(text)) for where, text in blocks_of_all_pages("console"))]


def each(blocks: Iterator[tuple[str, str]] | list[tuple[str, str]]) -> list[Any]:
    return [pytest.param(text, id=where) for where, text in blocks]


def test_every_block_is_of_a_language_that_a_test_takes() -> None:
    opened = {
        (language, str(path.relative_to(ROOT)))
        for path in PAGES
        for language in re.findall(r"^ *```([^\s`]*)\n.*?^ *```$", path.read_text(), re.MULTILINE | re.DOTALL)
    }
    assert [one for one in sorted(opened) if one[0] not in TAKEN_BY] == []
    assert {language for language, _ in opened} == TAKEN_BY.keys()


@pytest.mark.parametrize("text", each(SCRIPTS))
def test_a_shell_takes_what_is_to_be_typed(text: str) -> None:
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stderr
    for script in re.findall(r"(?:^|\s)((?:scripts|benchmarks|deploy)/[\w./-]+)(?=\s|$)", text):
        assert (ROOT / script).exists(), script


@pytest.mark.parametrize("text", each(list(blocks_of_all_pages("sh"))))
def test_a_line_starts_a_program_that_the_guides_know(text: str) -> None:
    for line in text.replace("\\\n", " ").splitlines():
        words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=.*", word)]
        known = words and (words[0] in PROGRAMS or (words[0].startswith("scripts/") and (ROOT / words[0]).exists()))
        assert not words or known, line


@pytest.mark.parametrize("text", each(blocks_of_all_pages("python")))
def test_python_compiles(text: str) -> None:
    compile(text, "a block of the documents", "exec")


@pytest.mark.parametrize("text", each(blocks_of_all_pages("yaml")))
def test_yaml_is_a_table(text: str) -> None:
    assert isinstance(yaml.safe_load(text), dict)


@pytest.mark.parametrize("text", each(blocks_of_all_pages("toml")))
def test_toml_is_settings_or_a_file_that_a_command_reads(text: str, tmp_path: Path) -> None:
    path = tmp_path / "berth.toml"
    path.write_text(text.replace("/etc/berth/", f"{tmp_path}/"))
    tree = tomllib.loads(text)
    if tree.keys() <= {"tokens"}:
        digests = itertools.count(1)
        path.write_text(re.sub(r'"\.\.\."', lambda _: f'"{next(digests):064x}"', text))
        assert len(read_tokens(path)) == len(tree["tokens"])
    elif tree.keys() <= SECTIONS.keys():
        planned = plan(ObjectsChange(changes=tuple(read_file(path)[0]), who="a reader"), {})
        assert isinstance(planned, ChangePlan), planned
    else:
        assert read_settings(path, {}).cells


@pytest.mark.parametrize("text", each(blocks_of_all_pages("json")))
def test_json_is_a_message(text: str) -> None:
    tag = json.loads(text).get("type", "build.request.v1")
    kinds = {row.tag: row.message for row in MESSAGES}
    assert isinstance(msgspec.json.decode(text, type=kinds[tag]), kinds[tag])
    assert kinds["build.request.v1"] is BuildRequest


def curls() -> Iterator[tuple[str, str]]:
    """Requests of the documents to the HTTP API of `berth web`, a line each."""
    for where, text in SCRIPTS:
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("curl ") and API_ROOT in line:
                yield f"{where}: {line.split(API_ROOT)[1].split()[0]}", line


@pytest.fixture(scope="module")
def routes() -> list[Route]:
    nothing = cast("Any", NoneType())
    parts = (WebApi(nothing, nothing, nothing), WebMoves(nothing, nothing, nothing))
    parts = (*parts, WebOperations(nothing, nothing), WebDrains(nothing))
    return [route for part in parts for route in part.routes()]


@pytest.mark.parametrize("line", each(curls()))
def test_a_request_by_curl_is_an_operation_of_the_http_api(line: str, routes: list[Route]) -> None:
    words = shlex.split(line)
    url = urlsplit(next(word for word in words if word.startswith("http")))
    body = words[words.index("-d") + 1] if "-d" in words else None
    method = words[words.index("-X") + 1] if "-X" in words else "GET" if body is None else "POST"
    scope = {"type": "http", "method": method, "path": url.path.removeprefix(API_ROOT)}
    found = next((route for route in routes if route.matches(scope)[0] is Match.FULL), None)
    assert found is not None, f"no route takes {method} {url.path}"
    whole = document(routes)
    operation = whole["paths"][found.path_format][method.lower()]
    assert ("requestBody" in operation) is (body is not None)
    if body is not None:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        validator = Draft202012Validator({**schema, "components": whole["components"]})
        assert [error.message for error in validator.iter_errors(json.loads(body))] == []
