"""The commands of docs/operate/trial.md, as they stand there, beside an OpenStack Placement of 1,000 hosts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import sqlalchemy
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import create_async_engine

from berth.up.embedded.rabbitmq import RabbitMQ
from tests.integration.nova_scheduler.trial_world import NEEDS, Cloud, cloud_of
from tests.kit.answering import answering
from tests.kit.forks import run_berth
from tests.kit.sources import ROOT
from tests.kit.waiting import until

pytestmark = list(NEEDS)
PAGE = ROOT / "docs" / "operate" / "trial.md"
HOSTS = 1_000
NOVA_CONF = """
[DEFAULT]
transport_url = rabbit://%s
[filter_scheduler]
enabled_filters = ComputeFilter,ServerGroupAntiAffinityFilter
"""


def blocks(kind: str) -> list[str]:
    """The page's fenced blocks of one kind, without their indentation."""
    found = re.findall(rf"^( *)```{kind}\n(.*?)^ *```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


def replaced(text: str, **values: str) -> str:
    """The page's text with what is the reader's own; each must be there."""
    for name, mine in values.items():
        assert re.search(PLACES[name], text), name
        text = re.sub(PLACES[name], mine.replace("\\", r"\\"), text)
    return text


# What a reader replaces.
PLACES = {
    "nova": r"http://nova:8774",
    "login": r"keystone = .*",
    "database": r"mysql\+aiomysql://\S*placement(?=\")",
    "port": r"\b8779\b",
    "page": r"127\.0\.0\.1:8780",
    "file": r"/etc/nova/nova\.conf > berth\.toml",
}


async def prepare(here: Cloud) -> str:
    """The users of the page's first part. Returns the address of Placement's database."""
    added, permitted = blocks("sh")[0].splitlines()
    here.broker.control(*shlex.split(added)[1:])
    here.broker.control(*shlex.split(permitted)[1:])
    (grants,) = blocks("mysql")
    engine = create_async_engine(here.database, poolclass=sqlalchemy.NullPool)
    async with engine.begin() as connection:
        await connection.execute(sqlalchemy.text("DROP ROLE IF EXISTS berth_trial"))
        for one in re.sub(r"IDENTIFIED BY .* PostgreSQL: (.*)", r"\1;", grants).split(";"):
            if one.strip():
                await connection.execute(sqlalchemy.text(one))
    await engine.dispose()
    url = make_url(here.database).set(username="berth_trial", password="PASSWORD")
    return url.render_as_string(hide_password=False)


async def revoke(here: Cloud) -> None:
    """A role is of the whole server, which other tests use."""
    engine = create_async_engine(here.database, poolclass=sqlalchemy.NullPool)
    async with engine.begin() as connection:
        await connection.execute(sqlalchemy.text("DROP OWNED BY berth_trial"))
        await connection.execute(sqlalchemy.text("DROP ROLE berth_trial"))
    await engine.dispose()


async def test_as_an_operator_runs_it(own_broker: RabbitMQ, empty_database: str, tmp_path: Path) -> None:
    conf, file = tmp_path / "nova.conf", tmp_path / "berth.toml"
    ports = [str(port) for port in free_ports(2)]
    async with cloud_of(own_broker, empty_database, tmp_path, HOSTS) as here, answering(here.answer) as nova:
        database = await prepare(here)
        url = own_broker.url("nova", user="berth-trial", password="PASSWORD").removeprefix("amqp://")
        conf.write_text(NOVA_CONF % url)
        _, translate, start = blocks("sh")
        command = shlex.split(replaced(translate, file=str(conf)))
        translated = await asyncio.to_thread(run_berth, *command[1:], env=os.environ, timeout_s=60.0)
        assert translated.returncode == 0, translated.stderr
        settings = replaced(blocks("toml")[0], nova=nova, login='token = "t"', database=database, port=ports[0])
        file.write_text(translated.stdout + settings)
        run, look = replaced(start, page=f"127.0.0.1:{ports[1]}", port=ports[0]).splitlines()
        berth = [sys.executable, "-m", "berth", "--config", str(file), *shlex.split(run)[1:], "-o", "json"]
        log = tmp_path / "berth.log"
        with log.open("w") as errors:
            process = await asyncio.create_subprocess_exec(
                *berth, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors
            )
        try:
            async with httpx.AsyncClient() as http:
                ready = shlex.split(look)[-1]
                await answered(http, ready, '"ready":true')
                metrics = ready.replace("/readyz", "/metrics")

                async def compared() -> None:
                    await answered(http, metrics, f'berth_nova_shadow_seconds_count{{by="stock"}} {len(here.taken)}.0')

                alive: list[str] = []
                for _ in range(2):
                    await here.round(alive, compared)
                assert 0 <= (await http.get(ready)).json()["ages_s"]["replica"] < 60
                await answered(http, f"http://127.0.0.1:{ports[1]}/nova", '<p id="age">')
            file.write_text(f"{file.read_text()}log_level = 'debug'\n")
            process.send_signal(signal.SIGHUP)
            await until(lambda: '"nova.settings_reloaded"' in log.read_text())
            process.terminate()
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await revoke(here)
    told = json.loads(said)
    assert process.returncode == 0 and told["calls"]["same"] + told["calls"]["other host"] == len(here.taken) == 12
    assert 0 < told["mean_s"]["berth"] < told["mean_s"]["stock"]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        return [held.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(count)]


async def answered(http: httpx.AsyncClient, url: str, text: str) -> None:
    """Until the process answers so."""
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if text in (await http.get(url)).text:
                return
        await asyncio.sleep(0.1)
