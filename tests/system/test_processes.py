"""The smallest whole system of real processes: bad input, its page's examples, and careless second starts; commands
under an alarm of the broker.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aio_pika
import pytest
from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from berth.up.embedded.rabbitmq import RabbitMQ
from berth.up.worker_processes import Worker
from bus.bus import API
from bus.consuming import dead_letters
from bus.consuming.dead_letters import DeadLetter
from bus.rabbitmq.transport import RabbitTransport
from bus.service.main import EXIT_SETTINGS
from tests.kit import lent, servers
from tests.kit.forks import run_berth
from tests.kit.waiting import PATIENCE_S, until, wait_until
from tests.kit.web_process import served
from tests.system.small import Small, small_processes

pytestmark = [pytest.mark.system, pytest.mark.rabbitmq, pytest.mark.postgres, pytest.mark.timeout(600)]


# --- Bad input to a whole system of real processes: each piece ends coded, the workers go on, nothing good is lost.


PROJECT = "bad"
KEY = f"build.request.{PROJECT}"
BATCH = "application/vnd.berth.batch+json"


@pytest.fixture(scope="module")
def small() -> Iterator[Small]:
    with small_processes() as found:
        yield found


@pytest.fixture
def unharmed(small: Small) -> Iterator[Small]:
    before = small.pids()
    yield small
    assert small.pids() == before, "no worker died of anything it was sent"


class Client:
    """An AMQP client that knows nothing of berth: it publishes, and collects events and replies."""

    def __init__(self, small: Small, channel: AbstractChannel) -> None:
        self.small = small
        self.events: list[dict[str, Any]] = []
        self.replies: dict[str, dict[str, Any]] = {}
        self._channel = channel

    async def open(self) -> None:
        listening = await self._channel.declare_queue(exclusive=True)
        await listening.bind("berth.events", f"build.event.*.{PROJECT}")
        await listening.consume(self._event, no_ack=True)
        answers = await self._channel.declare_queue(exclusive=True)
        await answers.bind("berth.replies", answers.name)
        await answers.consume(self._reply, no_ack=True)
        self._reply_to = answers.name

    async def publish(
        self,
        body: bytes,
        *,
        key: str = KEY,
        exchange: str = "berth",
        content_type: str = "application/json",
        answer: bool = False,
        **properties: Any,
    ) -> str:
        """Publish as it is; returns the message's id."""
        message_id = str(uuid.uuid4())
        message = aio_pika.Message(
            body,
            content_type=content_type,
            delivery_mode=2,
            message_id=message_id,
            reply_to=self._reply_to if answer else None,
            correlation_id=message_id,
            **properties,
        )
        to = await self._channel.get_exchange(exchange, ensure=False) if exchange else self._channel.default_exchange
        await to.publish(message, key)
        return message_id

    async def terminal(self, instance: str) -> dict[str, Any]:
        """The first terminal event of an instance."""

        def found() -> dict[str, Any] | None:
            return next((e for e in self.events if e["instance_uuid"] == instance and e.get("terminal")), None)

        return await until(found)

    async def ends(self, instance: str, count: int) -> list[dict[str, Any]]:
        """The terminal events of an instance, once there are so many."""

        def found() -> list[dict[str, Any]] | None:
            ends = [event for event in self.events if event["instance_uuid"] == instance and event.get("terminal")]
            return ends if len(ends) >= count else None

        return await until(found)

    async def reply(self, message_id: str) -> dict[str, Any]:
        """The answer to one message."""
        return await until(lambda: self.replies.get(message_id))

    async def dead_letter(self, queue: str, message_id: str) -> DeadLetter:
        """The dead letter that a message became."""
        transport = self.small.site.transport(API, process="test")
        await transport.open()
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    for letter in await dead_letters.list_dead(transport, queue, 1000):
                        if letter.id == message_id:
                            return letter
                    await asyncio.sleep(0.02)  # a broker does not announce its depths
        finally:
            await transport.close()

    async def assert_all_goes_on(self) -> None:
        """A good request after the bad one is built."""
        good = str(uuid.uuid4())
        await self.publish(request(good))
        assert (await self.terminal(good))["state"] == "active"

    async def _event(self, message: AbstractIncomingMessage) -> None:
        body = json.loads(message.body)
        self.events += [item["body"] for item in body] if message.content_type == BATCH else [body]

    async def _reply(self, message: AbstractIncomingMessage) -> None:
        assert message.correlation_id is not None
        self.replies[message.correlation_id] = {"type": message.type, **json.loads(message.body)}


@pytest.fixture
async def client(unharmed: Small) -> AsyncIterator[Client]:
    async with await aio_pika.connect(unharmed.amqp_url) as connection:
        client = Client(unharmed, await connection.channel())
        await client.open()
        yield client


# Fixed: every process of a test run must collect the same tests.
FIXED = [f"{number:08x}-0000-4000-8000-000000000000" for number in range(8)]


def request(instance: str, **fields: Any) -> bytes:
    return json.dumps({"instance_uuid": instance, "flavor": "m1.tiny", "project_id": PROJECT, **fields}).encode()


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("an unknown type", {"type": "build.request.v99"}, "message.unknown_type"),
    ("another project", {"project_id": "another"}, "message.wrong_key"),
    ("declared to be a batch", {}, "message.malformed"),
    ("an unknown flavor", {"flavor": "m9.colossal"}, "flavor.unknown"),
]


@pytest.mark.parametrize(("fields", "code"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
async def test_a_request_whose_owner_is_known_is_refused_on_the_event_stream(
    client: Client, fields: dict[str, Any], code: str
) -> None:
    instance = str(uuid.uuid4())
    properties = {"content_type": BATCH} if fields == {} else {}
    await client.publish(request(instance, **fields), **properties)
    event = await client.terminal(instance)
    assert (event["state"], event["code"]) == ("refused", code)
    assert event["reason"]
    await client.assert_all_goes_on()


IMPOSSIBLE: list[tuple[str, dict[str, Any]]] = [
    ("an unknown host, by an operator", {"host": "no.such.host"}),
    ("an unknown zone", {"availability_zone": "moon"}),
]


@pytest.mark.parametrize("fields", [row[1] for row in IMPOSSIBLE], ids=[row[0] for row in IMPOSSIBLE])
async def test_what_no_host_can_do_fails_with_an_explanation(client: Client, fields: dict[str, Any]) -> None:
    instance = str(uuid.uuid4())
    by_operator: dict[str, Any] = (
        {"key": f"operator.request.{PROJECT}", "type": "build.request.v1"} if "host" in fields else {}
    )
    await client.publish(request(instance, **fields), **by_operator)
    event = await client.terminal(instance)
    assert (event["state"], event["code"]) == ("failed", "no_valid_host")
    assert next(iter(fields.values())) in event["reason"] and event["funnel"]


@pytest.mark.parametrize("name", ["\u202e\x1b[31m", "'; DROP TABLE build_requests; --", "ü" * 255])
async def test_an_odd_name_is_only_a_name(client: Client, name: str) -> None:
    instance = str(uuid.uuid4())
    await client.publish(request(instance, name=name))
    assert (await client.terminal(instance))["state"] == "active"


async def test_a_lone_surrogate_ends_coded(client: Client) -> None:
    """JSON can spell half a character; UTF-8 and PostgreSQL cannot."""
    sent = await client.publish(request(str(uuid.uuid4()), name="\ud800"), answer=True)
    answer = await client.reply(sent)
    assert answer["type"] in {"refusal.v1", "build.accepted.v1"}
    await client.assert_all_goes_on()


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "message.malformed"),
        (b'{"type":"x"}', "message.unknown_type"),
        (request(FIXED[3], flavor="m9"), "flavor.unknown"),
        (request(FIXED[4], max_attempts=0), "message.invalid"),
    ],
)
async def test_a_requester_that_waits_for_an_answer_gets_a_coded_one(client: Client, body: bytes, code: str) -> None:
    answer = await client.reply(await client.publish(body, answer=True))
    assert (answer["type"], answer["code"]) == ("refusal.v1", code)
    assert answer["reason"]


async def test_a_uuid_under_which_something_else_was_requested(client: Client) -> None:
    """The first request counts; the same again changes nothing; another under its uuid is refused."""
    instance = str(uuid.uuid4())
    assert (await client.reply(await client.publish(request(instance), answer=True)))["type"] == "build.accepted.v1"
    assert (await client.terminal(instance))["state"] == "active"
    assert (await client.reply(await client.publish(request(instance), answer=True)))["type"] == "build.accepted.v1"
    clash = await client.reply(await client.publish(request(instance, flavor="m1.large"), answer=True))
    assert (clash["type"], clash["code"]) == ("refusal.v1", "request.duplicate")
    await client.publish(request(instance, flavor="m1.large"))
    ends = await client.ends(instance, 3)
    assert [(end["state"], end.get("code", "")) for end in ends] == [
        ("active", ""), ("refused", "request.duplicate"), ("refused", "request.duplicate")
    ]  # fmt: skip
    assert [end["sequence"] > 0 for end in ends] == [True, False, False], "old events to a listener of the first"


async def test_one_bad_item_of_a_batch_harms_no_other(client: Client) -> None:
    good, bad, parked = (str(uuid.uuid4()) for _ in range(3))
    items = [
        {"meta": {"id": good}, "body": json.loads(request(good, type="build.request.v1"))},
        {"meta": {"id": bad}, "body": json.loads(request(bad, type="build.request.v1", max_attempts=-1))},
        {"meta": {"id": parked}, "body": {"type": "build.request.v1"}},
        {"meta": {"id": "d"}, "body": json.loads(request(str(uuid.uuid4()), type="build.request.v1"))},
    ]
    await client.publish(json.dumps(items).encode(), content_type=BATCH)
    assert (await client.terminal(good))["state"] == "active"
    assert (await client.terminal(items[3]["body"]["instance_uuid"]))["state"] == "active"
    assert (await client.terminal(bad))["code"] == "message.invalid"
    assert (await client.dead_letter("scheduler.requests", parked)).code == "message.invalid"


def update(root: str, *, root_uuid: str | None = None, version: object = 1, **provider: Any) -> bytes:
    report = {"uuid": root, "name": f"host-{root}", **provider}
    return json.dumps(
        {"reporter": "test", "version": version, "root_uuid": root_uuid or root, "providers": [report]}
    ).encode()


ROOT = FIXED[5]
INVENTORY: list[tuple[str, bytes, str]] = [
    ("a negative total", update(ROOT, inventories={"VCPU": {"total": -4}}), "message.invalid"),
    (
        "more reserved than there is",
        update(ROOT, inventories={"VCPU": {"total": 1, "reserved": 2}}),
        "inventory.reserved",
    ),
    ("an unknown class", update(ROOT, inventories={"VCPUS": {"total": 3}}), "class.unknown"),
    ("another root", update(ROOT, root_uuid=FIXED[6]), "message.wrong_key"),
    ("a parent from nowhere", update(ROOT, parent_uuid=FIXED[7]), "inventory.root"),
]


@pytest.mark.parametrize(("body", "code"), [row[1:] for row in INVENTORY], ids=[row[0] for row in INVENTORY])
async def test_a_bad_inventory_update_is_refused_or_parked(client: Client, body: bytes, code: str) -> None:
    key = f"inventory.update.{ROOT}"
    answer = await client.reply(await client.publish(body, key=key, answer=True))
    assert (answer["type"], answer["code"]) == ("refusal.v1", code), answer
    letter = await client.dead_letter("placement.inventory", await client.publish(body, key=key))
    assert (letter.code, bool(letter.reason)) == (code, True)
    assert json.loads(letter.body).items() >= json.loads(body).items(), "it can be mended and sent again"


async def test_a_good_inventory_update_after_the_bad_ones(client: Client) -> None:
    body = update(ROOT, inventories={"CUSTOM_WIDGET": {"total": 3}}, traits=["CUSTOM_FAST"])
    answer = await client.reply(await client.publish(body, key=f"inventory.update.{ROOT}", answer=True))
    assert (answer["type"], answer["outcome"]) == ("inventory.result.v1", "applied")
    gone = json.dumps({"reporter": "test", "version": 2, "root_uuid": ROOT}).encode()
    answer = await client.reply(await client.publish(gone, key=f"inventory.update.{ROOT}", answer=True))
    assert answer["outcome"] == "applied"


async def test_item_33_host_metrics_with_an_unknown_field_are_refused_by_name(client: Client) -> None:
    reading = {"host_uuid": ROOT, "at": 1.0, "values": {"power.watts": 1.0}, "value": {}}
    body = json.dumps({"source": "rack7", "readings": [reading]}).encode()
    sent = await client.publish(body, key="host.metrics.rack7", exchange="berth.events", answer=True)
    answer = await client.reply(sent)
    assert (answer["type"], answer["code"]) == ("refusal.v1", "message.invalid")
    assert answer["reason"].endswith("unknown field `value` - at `$.readings[0]`; did you mean `values`?")
    await client.assert_all_goes_on()


# --- The examples of docs/reference/messages.md, read out of the page and run as written, against real servers.


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "messages.md"
TIMEOUT_S = 120.0


def test_the_examples_publish_a_build_and_a_move_and_receive_their_events(small: Small, tmp_path: Path) -> None:
    build, action = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    mistyped = run(build.replace('"build.request.demo"', '"build.reqest.demo"'), small.amqp_url, tmp_path)
    done = run(build, small.amqp_url, tmp_path)
    events = [line.split() for line in done.stdout.splitlines()]
    instance = events[-1][0] if events else ""
    moved = run(action, small.amqp_url, tmp_path, INSTANCE=instance)
    assert mistyped.returncode == 1 and "NO_ROUTE" in mistyped.stderr, "it does not wait for what never comes"
    assert done.returncode == 0, done.stderr
    states = [state for _, state, *_ in events]
    assert states[-1] == "active"
    assert {"accepted", "scheduled", "building"} >= set(states[:-1])  # one that was overtaken is not published
    assert {uuid for uuid, *_ in events} == {instance}
    assert events[-1][2].startswith("cell1-c1-")
    assert moved.returncode == 0, moved.stderr
    state, host, *_ = moved.stdout.splitlines()[-1].split()
    assert state == "done" and host == events[-1][2]


def run(script: str, amqp_url: str, directory: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={"PATH": os.environ["PATH"], "AMQP_URL": amqp_url, **more},
        cwd=directory,  # nothing of berth's own is imported
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


# --- A second deployment as a careless operator starts it: its own database, and the buses of the first.


ROLES = {
    "scheduler": ("scheduler",),
    "placement": ("placement",),
    "conductor": ("conductor", "--cell", "cell1"),
}


def berth(small: Small, *arguments: str, database: str = "") -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    other = {"BERTH_DATABASE__URL": database} if database else {}
    return run_berth(*arguments, env={**kept, **small.variables, **other}, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("role", ROLES)
def test_no_worker_of_it_starts_and_each_gives_its_reason(small: Small, role: str) -> None:
    with servers.fresh_database(small.settings.database.url) as other:
        ended = berth(small, "run", *ROLES[role], database=other)
    output = ended.stdout + ended.stderr
    assert ended.returncode == EXIT_SETTINGS, output
    assert "bus.owned_by_another" in output and "belongs to another deployment" in output, output
    assert "berth bus disown" in output and "Traceback" not in output


def test_the_first_goes_on(small: Small) -> None:
    small.ready()
    built = berth(small, "boot", "--flavor", "m1.small", "--count", "3", "--wait")
    assert built.returncode == 0, built.stdout + built.stderr
    owner = berth(small, "bus", "list", "-o", "json")
    assert owner.returncode == 0, owner.stderr
    roles = {(one["bus"], role) for one in json.loads(owner.stdout)["items"] for role in one["owners"]}
    assert roles >= {("api", "placement"), ("api", "scheduler"), ("cell1", "conductor"), ("cell1", "scheduler")}


# --- Two real compute services of one name, as a careless `berth run compute` starts them: the second one must not
# run.


FIRST = "compute-cell1-c1"


def second(small: Small, name: str, *, wait_s: float) -> Worker:
    settings = {"BERTH_COMPUTE__NAME_WAIT_S": str(wait_s)}
    arguments = small.processes.workers[FIRST].arguments
    return small.processes.start(name, *arguments, settings=settings)


def test_the_second_service_of_a_name_ends_with_a_sentence_and_the_first_goes_on(small: Small) -> None:
    late = second(small, "late", wait_s=1.0)
    wait_until(lambda: not late.process.running)
    log = late.log.read_text()
    assert late.process.status == EXIT_SETTINGS, log
    assert "another process runs the compute service 'c1' of cell1" in log.replace("cell1-c1", "c1"), log
    assert "compute.name_conflict" in log and "Traceback" not in log
    assert small.processes.workers[FIRST].process.running
    small.ready(FIRST)


def test_a_service_that_is_started_before_the_former_one_is_gone_takes_over(small: Small) -> None:
    """A supervisor starts the next one while the broker still has the connection of the one that died."""
    next_one = second(small, "next", wait_s=PATIENCE_S)
    wait_until(lambda: "compute.name_waits" in next_one.log.read_text())
    small.processes.kill(FIRST)
    asyncio.run(small.processes.ready(["next"]))


def test_a_bus_is_taken_over_by_an_operators_word(small: Small) -> None:
    """The last of this module: the first deployment has gone."""
    small.processes.stop()
    assert berth(small, "bus", "disown", "api").returncode == EXIT_SETTINGS  # not without --yes
    released = berth(small, "bus", "disown", "api", "--yes")
    assert released.returncode == 0, released.stderr
    assert {"placement", "scheduler"} <= set(released.stdout.split())
    again = berth(small, "bus", "disown", "api", "--yes")
    assert (again.returncode, "bus.unowned" in again.stderr) == (1, True)
    assert "bus.unknown" in berth(small, "bus", "list", "--bus", "mars").stderr


# --- an alarm of the broker: it takes messages and confirms none


UNKNOWN = "10000000-0000-4000-8000-000000000001"
MOST_S = 40.0  # of a command, with its start on a busy machine; it was 64 s


@pytest.fixture(scope="module")
def out_of_memory() -> Iterator[RabbitMQ]:
    """A broker with berth's topology and the alarm of `vm_memory_high_watermark`."""

    async def declare() -> None:
        transport = RabbitTransport(broker.url(), name=API)
        await transport.open()
        await transport.declare_shared()
        await transport.close()

    with lent.brokers.lend() as broker:
        asyncio.run(declare())
        broker.evaluate("vm_memory_monitor:set_vm_memory_high_watermark(0.0000001).")
        yield broker


@pytest.mark.parametrize(
    "words",
    [
        ("boot", "--flavor", "m1.tiny", "--timeout", "1"),
        ("boot", "--flavor", "m1.tiny", "--timeout", "1", "--wait"),
        ("delete", UNKNOWN, "--timeout", "1"),
    ],
    ids=" ".join,
)
def test_a_command_ends_soon_after_its_timeout(out_of_memory: RabbitMQ, words: tuple[str, ...], tmp_path: Path) -> None:
    """`berth boot --timeout 20` took 64 s: it waited 30 s for a confirm, and 34 s for its farewell."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    env = {**kept, "BERTH_BUS__URL": out_of_memory.url(), "BERTH_STATE_DIR": str(tmp_path)}
    with served(env, tmp_path) as found:
        done = run_berth(*words, env={**env, **found}, timeout_s=MOST_S)
    assert done.returncode == 4 and ".timeout)" in done.stderr, done.stderr
