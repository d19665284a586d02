"""Contexts and tokens on the command line: files that others could read, hostile ones, and which address is used."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from berth.cli.common import explain
from berth.cli.main import app
from berth.cli.session import contexts
from berth.cli.session.contexts import (
    Context,
    ContextFault,
    contexts_file,
    delete_context,
    found_context,
    read_contexts,
    set_context,
    use_context,
)
from berth.cli.session.tokens import seconds_of
from berth.client import ApiAddressInvalid, ApiAnswerInvalid, ApiProblem, ApiTimeout, ApiUnavailable
from berth.config.at_up import UpAddress, find_address, leave_address, lock_file, state_of, write_private
from berth.config.settings import read_settings

ONE = Context("https://one.example", "secret-1")
TWO = Context("http://127.0.0.1:8780", "secret-2", insecure=True)


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "XDG_STATE_HOME": str(tmp_path / "state")}
    for name in [name for name in os.environ if name.startswith("BERTH_")]:
        monkeypatch.delenv(name)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return found


@contextmanager
def berth_up(state: Path) -> Iterator[None]:
    """The lock of a `berth up` that runs."""
    state.mkdir(parents=True, exist_ok=True)
    with lock_file(state).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_contexts_are_their_users_alone_from_the_first(env: dict[str, str]) -> None:
    path = contexts_file(env)
    set_context(path, "one", ONE)
    set_context(path, "two", TWO)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert read_contexts(path) == contexts.Contexts("two", {"one": ONE, "two": TWO})
    use_context(path, "one")
    assert delete_context(path, "") == "one"
    assert read_contexts(path) == contexts.Contexts("", {"two": TWO})
    assert sorted(one.name for one in path.parent.iterdir()) == ["contexts.json", "contexts.lock"]


def test_a_write_that_fails_leaves_what_was_there(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = contexts_file(env)
    set_context(path, "one", ONE)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ContextFault) as fault:
        set_context(path, "two", TWO)
    assert fault.value.code == "context.unusable"
    assert read_contexts(path) == contexts.Contexts("one", {"one": ONE})
    assert sorted(one.name for one in path.parent.iterdir()) == ["contexts.json", "contexts.lock"]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"null", b"{", b"[" * 100_000, b"\xff\xfe", b'{"current": 1}', b'{"contexts": {"a": {}}}',
        b'{"contexts": {"a/b": {"url": "https://x"}}}', b'{"other": 1}',
        b'{"contexts": {"a": {"url": "%s"}}}' % (b"x" * 3000),
    ],
)  # fmt: skip
def test_a_hostile_file_is_a_coded_fault(content: bytes, env: dict[str, str]) -> None:
    path = contexts_file(env)
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ContextFault) as fault:
        read_contexts(path)
    assert fault.value.code == "context.invalid"


def test_a_file_that_others_can_read_a_pipe_and_a_long_one_are_refused(env: dict[str, str]) -> None:
    path = contexts_file(env)
    set_context(path, "one", ONE)
    makes: list[Callable[[], object]] = [
        lambda: path.chmod(0o644),
        lambda: os.mkfifo(path, 0o600),
        lambda: path.mkdir(mode=0o700),
        lambda: write_private(path, b" " * 2**21),
    ]
    refused = []
    for make in makes:
        make()
        with pytest.raises(ContextFault) as fault:
            read_contexts(path)
        refused.append(fault.value.code)
        (path.rmdir if path.is_dir() else path.unlink)()
    assert refused == ["context.unusable"] * 4


def test_a_name_that_is_none_is_refused(env: dict[str, str]) -> None:
    for name in ("", "a b", "a\n", "../x", "a" * 65):
        with pytest.raises(ContextFault):
            set_context(contexts_file(env), name, ONE)
    for change in (use_context, delete_context):
        with pytest.raises(ContextFault) as fault:
            change(contexts_file(env), "none")
        assert fault.value.code == "context.unknown"


# --- which address


def test_the_variables_come_before_the_file_and_that_before_a_running_up(env: dict[str, str], tmp_path: Path) -> None:
    state = tmp_path / "state" / "berth"
    with pytest.raises(ContextFault) as fault:
        found_context(env)
    assert fault.value.code == "context.none"
    with berth_up(tmp_path / "up"):
        settings = {**env, "BERTH_STATE_DIR": str(tmp_path / "up")}
        leave_address(tmp_path / "up", UpAddress("http://127.0.0.1:1", "up"))
        assert found_context(settings).context == Context("http://127.0.0.1:1", "up")
        set_context(contexts_file(env), "one", ONE)
        assert found_context(settings).context == ONE
        assert found_context({**settings, "BERTH_TOKEN": "other"}).context == Context(ONE.url, "other")
        at = {**settings, "BERTH_URL": "https://two.example"}
        assert found_context(at).context == Context("https://two.example"), "a token goes to another address"
        assert found_context({**at, "BERTH_TOKEN": "t"}).context == Context("https://two.example", "t")
    assert not state.exists()


def test_what_a_killed_up_has_left_is_used_no_more(env: dict[str, str], tmp_path: Path) -> None:
    """Its port may be another user's program by now, and would be shown the token."""
    state = tmp_path / "state" / "berth"
    with berth_up(state):
        remove = leave_address(state, UpAddress("http://127.0.0.1:1", "up"))
        assert (state / "api.json").stat().st_mode & 0o777 == 0o600
        assert find_address(state) == UpAddress("http://127.0.0.1:1", "up")
        (state / "api.json").chmod(0o644)
        assert find_address(state) is None, "others could have read or written it"
        (state / "api.json").chmod(0o600)
    assert find_address(state) is None
    remove()
    assert not (state / "api.json").exists()


def test_the_state_directory_is_that_of_the_settings(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "berth.toml").write_text('state_dir = "here"\n')
    other = tmp_path / "other.toml"
    other.write_text('state_dir = "there"\n')
    cases = [
        (None, {}), (other, {}), (None, {"BERTH_CONFIG": str(other)}), (other, {"BERTH_STATE_DIR": "/x"}),
    ]  # fmt: skip
    for config, more in cases:
        known = {**env, **more}
        assert state_of(config, known) == read_settings(config, known).state
    (tmp_path / "berth.toml").unlink()
    assert state_of(None, env) == read_settings(None, env).state == tmp_path / "state" / "berth"


def test_variables_of_the_client_are_no_settings(env: dict[str, str]) -> None:
    more = {"BERTH_URL": "https://x", "BERTH_TOKEN": "t", "BERTH_CA_FILE": "c", "BERTH_CLI_LOG": "info"}
    assert read_settings(None, {**env, **more}) == read_settings(None, env)


# --- commands


def test_a_context_is_shown_without_its_token(env: dict[str, str]) -> None:
    set_context(contexts_file(env), "one", ONE)
    set_context(contexts_file(env), "two", TWO)
    run = CliRunner().invoke
    listed = json.loads(run(app, ["context", "list", "-o", "json"]).output)
    assert [(one["name"], one["in_use"]) for one in listed["items"]] == [("one", False), ("two", True)]
    assert run(app, ["context", "use", "one"]).exit_code == 0
    shown = run(app, ["context", "show", "-o", "json"])
    assert json.loads(shown.output) == {
        "source": "context one", "has_token": True, "url": ONE.url, "ca_file": "", "insecure": False,
    }  # fmt: skip
    for words in (["context", "list"], ["context", "show"], ["context", "show", "two"]):
        output = run(app, words).output
        assert ("secret" not in output and "https://one.example" in output) or "127.0.0.1" in output
    assert run(app, ["logout"]).exit_code == 0
    assert run(app, ["context", "use", "one"]).exit_code == 2


def test_a_login_takes_its_token_from_standard_input_and_only_where_it_is_safe(env: dict[str, str]) -> None:
    run = CliRunner().invoke
    assert run(app, ["login", "http://berth.example"], input="secret\n").exit_code == 2
    assert run(app, ["login", "http://127.0.0.1:1"], input="\n").exit_code == 2
    assert run(app, ["login", "http://127.0.0.1:1"], input="secret\n").exit_code == 3, "nothing answers"
    assert not contexts_file(env).exists(), "a login that failed is kept"


def test_a_refusal_has_the_exit_status_of_its_kind() -> None:
    problems = [(400, 2), (401, 2), (403, 2), (404, 1), (409, 1), (422, 1), (429, 3), (500, 1), (503, 3), (504, 4)]
    faults = {
        **{ApiProblem(status, "a.b", ""): wanted for status, wanted in problems},
        ApiUnavailable(): 3,
        ApiTimeout(): 4,
        ApiAnswerInvalid(): 1,
        ApiAddressInvalid(): 2,
        ContextFault(): 2,
    }
    for fault, wanted in faults.items():
        stop = explain(fault)
        assert stop is not None and stop.status == wanted, fault


def test_a_duration_is_a_number_and_a_unit() -> None:
    assert [seconds_of(one) for one in ("60s", "30m", "12h", "90d", "3650d")] == [
        60,
        1800,
        43_200,
        7_776_000,
        315_360_000,
    ]
    for text in ("", "0d", "59s", "3651d", "1w", "-1d", "1.5h", "\u0661d", "9999999999s"):
        with pytest.raises(typer.BadParameter):
            seconds_of(text)


HEAVY = {
    "sqlalchemy", "asyncpg", "aio_pika", "aiormq", "numpy", "uvloop", "uvicorn", "starlette", "structlog",
    "prometheus_client", "scheduler_worker", "berth.config.settings",
}  # fmt: skip


def test_a_command_that_calls_the_api_loads_no_broker_and_no_database(env: dict[str, str]) -> None:
    """Their start is what a person waits for."""
    set_context(contexts_file(env), "one", ONE)
    code = """
import sys
from berth.cli.main import main
try:
    main()
except SystemExit:
    print(*{one.partition(".")[0] for one in sys.modules}, *[one for one in sys.modules if one.startswith("berth.")])
"""
    for words in ("context list", "token list", "login --help", "list", "delete x --yes", "host list"):
        command = [sys.executable, "-c", code, *words.split()]
        environ = {**os.environ, "BERTH_URL": "http://127.0.0.1:1"}
        found = subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout.split()
        assert "berth.cli.http" in found
        assert not HEAVY & {*found}, words


def test_each_command_that_calls_the_api_can_be_imported_with_the_client_alone() -> None:
    """`berth delete` and `berth host list` needed asyncpg, which only `[server]` brings."""
    modules = (
        "instance.instances", "instance.several", "instance.actions", "instance.logs", "instance.why", "fleet.hosts",
        "fleet.fences", "fleet.services", "fleet.zones", "fleet.drains", "fleet.cells", "fleet.baremetal",
        "fleet.host_metrics", "claims.held", "claims.quarantine", "claims.recovery", "site.dead_letters", "site.status",
        "objects.edits", "objects.objects",
    )  # fmt: skip
    code = f"""
import importlib, sys
for name in {modules}:
    importlib.import_module("berth.cli." + name)
    for one in {HEAVY}.intersection(sys.modules):
        print(name, one)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found == ""
