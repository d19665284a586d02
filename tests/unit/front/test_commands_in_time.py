"""Commands of operators end when the database accepts connections and does not answer."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from berth.cli import app
from berth.commands import common


@pytest.mark.parametrize(
    "arguments",
    [
        ["breaker", "list"],
        ["quarantine", "list"],
        ["quarantine", "release", "10000000-0000-4000-8000-000000000001", "--keep"],
    ],
)
def test_a_command_ends_with_a_sentence(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`berth breaker list` waited without end, as a worker does."""
    monkeypatch.setattr(common, "OPEN_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://berth@127.0.0.1:{silent.getsockname()[1]}/berth"
        (tmp_path / "berth.toml").write_text(f'state_dir = "{tmp_path}"\n[database]\nurl = "{url}"\n')
        result = CliRunner().invoke(app, ["--config", str(tmp_path / "berth.toml"), *arguments])
    assert result.exit_code == common.Exit.UNAVAILABLE
    assert "no answer from the database within 0.2 s" in result.output
