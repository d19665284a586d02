"""The output of `berth up`: where everything answers, what to type next, and no password."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from berth.commands.processes import as_processes, block, one_process
from berth.rest_address import AtUp
from berth.settings import MEMORY, Settings
from berth.site import Site
from berth.trial.up_processes import ProcessCounts, RunningProcesses
from berth.trial.worker_processes import WorkerProcesses
from placement_worker.rest.config import RestConfig

URL = "postgresql://berth:hunter2@127.0.0.1:5433/postgres"


def messages_of(settings: Settings, ironic_url: str | None = None, **rest: Any) -> dict[str, Any]:
    here = Site(settings, database_url=URL)
    return one_process(here, ("cell1-c1", "cell2-c1"), ironic_url, AtUp(settings=settings, **rest))


def test_it_prints_what_runs_where_and_what_to_type(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path))
    served = replace(settings, placement=replace(settings.placement, rest=RestConfig(listen="127.0.0.1:8778")))
    text = block(messages_of(served, "http://127.0.0.1:6385"))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[1] == "berth is up: one process"
    for expected in (
        "cells cell1, cell2",
        "computes cell1-c1, cell2-c1",
        f"bus in this process; other terminals reach it at {tmp_path}/bus.sock",
        "PostgreSQL postgresql://berth:***@127.0.0.1:5433/postgres",
        "Placement http://127.0.0.1:8778",
        "Ironic http://127.0.0.1:6385 (simulated)",
        "berth boot --flavor m1.small --count 50 --wait",
        "Ctrl-C drains and ends it.",
    ):
        assert expected in lines, text
    assert "hunter2" not in text


def test_the_api_of_the_default_is_printed_with_its_token_and_why_it_is_not_where_one_looks(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path))
    served = replace(settings, placement=replace(settings.placement, rest=RestConfig(listen="127.0.0.1:9")))
    answer = messages_of(served, token=tmp_path / "placement.token", taken="127.0.0.1:8778")
    line = f"http://127.0.0.1:9 (127.0.0.1:8778 is taken), for the token in {tmp_path}/placement.token"
    assert line in block(answer)
    assert (answer["placement_api"], answer["placement_token"]) == ("http://127.0.0.1:9", f"{tmp_path}/placement.token")


def test_what_is_not_there_is_not_printed(tmp_path: Path) -> None:
    text = block(messages_of(Settings(state_dir=str(tmp_path))))
    assert "Ironic" not in text and "logs" not in text and "/metrics" not in text
    assert "BERTH_PLACEMENT__REST__LISTEN" in text


def test_processes_are_printed_with_their_ports() -> None:
    workers = {"scheduler1": {"pid": 1, "port": 4001, "log": "/x"}, "placement1": {"pid": 2, "port": 4002, "log": "/y"}}
    text = block(
        {
            "up": True, "cells": ("a",), "cpus": 2, "numbers": None, "workers": workers, "logs": "/state/logs",
            "bus": "amqp://u:***@h/berth", "database": "d", "placement_api": None, "ironic": None,
        }
    )  # fmt: skip
    assert "berth is up: 2 processes for 2 CPUs" in text
    assert "scheduler1 4001, placement1 4002" in text and "/state/logs" in text and "amqp://u:***@h/berth" in text


def test_servers_are_printed_without_their_passwords(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path))
    settings = replace(settings, bus=replace(settings.bus, url="amqp://berth:hunter2@127.0.0.1:5672/berth"))
    here = Site(settings, database_url=URL)
    running = RunningProcesses(
        processes=WorkerProcesses(tmp_path, {}), site=here, logs=tmp_path / "logs", ironic_url="http://127.0.0.1:6385"
    )
    count = ProcessCounts(schedulers=1, placements=1, conductors=1, computes=1)
    answer = as_processes(running, count, 2, AtUp(settings=settings))
    assert (answer["bus"], answer["database"]) == (
        "amqp://berth:***@127.0.0.1:5672/berth",
        "postgresql://berth:***@127.0.0.1:5433/postgres",
    )
    assert (answer["logs"], answer["cpus"], answer["ironic"]) == (f"{tmp_path}/logs", 2, "http://127.0.0.1:6385")
    in_one = one_process(here, ("cell1-c1",), None, AtUp(settings=settings))
    assert (in_one["bus"], in_one["database"]) == (answer["bus"], answer["database"])
    assert "hunter2" not in str(answer) + str(in_one)
    assert "RabbitMQ amqp://berth:***@127.0.0.1:5672/berth" in " ".join(block(in_one).split())


def test_the_next_thing_to_type_is_at_the_end() -> None:
    text = block(
        {
            "up": True, "cells": ("a",), "workers": {}, "socket": "/s", "bus": MEMORY, "database": "d",
            "placement_api": None, "ironic": None,
        }
    )  # fmt: skip
    assert [line.strip() for line in text.splitlines()[-7:] if line] == [
        "Next, in another terminal:", "berth boot --flavor m1.small --count 50 --wait", "berth list", "berth hosts",
        "berth check", "Ctrl-C drains and ends it.",
    ]  # fmt: skip
