"""Checks of schedulers that end, start and stand beside others while servers are asked for."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any
from unittest import mock

import outside
from nova.virt import fake

from tests.nova.checks.cloud import HOSTS, PATIENCE, Cloud, Server

STEP_S = 1.0


class Schedulers(Cloud):
    """A cloud that has no scheduler until one is started."""

    def setUp(self) -> None:
        super().setUp()
        self.servers = outside.world().servers

    def ended(self, server: Server) -> Server:
        """The server once it is built, or not."""
        for _ in range(PATIENCE):
            found: Server = self.api.get_server(server["id"])
            if found["status"] != "BUILD":
                return found
            time.sleep(STEP_S)
        raise AssertionError(f"{server['id']} has no end")

    def held_twice(self) -> dict[str, int]:
        """{host: memory} that is used and belongs to no server that is there."""
        wanted = dict.fromkeys(HOSTS, 0)
        for one in self.api.get_servers(detail=True):
            if one["status"] == "ACTIVE":
                wanted[one["OS-EXT-SRV-ATTR:host"]] += one["flavor"]["ram"]
        over = {}
        for host, memory in wanted.items():
            used = self._get_provider_usages(self._get_provider_uuid_by_host(host)).get("MEMORY_MB", 0)
            if used != memory:
                over[host] = used - memory
        return over


class Killed(Schedulers):
    """A front is killed when it has claimed and before it has answered; another one goes on."""

    def kill_between(self) -> None:
        """Kill the front that has claimed, and start another one."""
        self.servers.held()
        self.holding.end(signal.SIGKILL)
        self.servers.start_front()

    def test_a_boot(self) -> None:
        self.holding = self.servers.start_front(holds=True)
        server = self.request()
        self.kill_between()
        self.settled(server)
        self.assertEqual({}, self.held_twice())

    def test_several_of_one_request(self) -> None:
        self.holding = self.servers.start_front(holds=True)
        self.request(name="many", min_count=3, max_count=3)
        self.kill_between()
        for one in self.api.get_servers(detail=True):
            self.settled(one)
        self.assertEqual({}, self.held_twice())

    def test_a_member_of_a_group(self) -> None:
        self.holding = self.servers.start_front(holds=True)
        group = self.group("anti-affinity")
        server = self.request(hints={"group": group})
        self.kill_between()
        first = self.settled(server)
        others = [self.member(group) for _ in HOSTS[1:]]
        self.assertEqual(set(HOSTS), {self.host(one) for one in (first, *others)})
        self.assertEqual({}, self.held_twice())

    def test_a_migration(self) -> None:
        first = self.servers.start_front()
        server = self.boot(host="host1")
        first.end(signal.SIGTERM)
        self.holding = self.servers.start_front(holds=True)
        self.act(server, migrate=None)
        self.kill_between()
        self.waited(server, "VERIFY_RESIZE")
        self._confirm_resize(server)
        self.moved(server, "host1")
        self.assertEqual({}, self.held_twice())

    def test_a_stock_scheduler_goes_on(self) -> None:
        """The call fails as one does whose stock nova-scheduler is killed, and what is deleted holds nothing."""
        self.flags(rpc_response_timeout=5)
        self.holding = self.servers.start_front(holds=True)
        server = self.request()
        self.servers.held()
        self.holding.end(signal.SIGKILL)
        self.servers.start_stock()
        self.settled(self.request())
        self.waited(server, "ERROR")
        self._delete_server(server)
        self.assertEqual({}, self.held_twice())


class Restarted(Schedulers):
    """A front is stopped by SIGTERM while servers are asked for and built, and another one is started."""

    def lost_none(self, fronts: int) -> None:
        """Servers of before, of the restart of one front, and of after. Some are with nova-compute when it ends: their
        builds end with a cast to the schedulers.
        """
        running = [self.servers.start_front() for _ in range(fronts)]
        flavor = self.flavor(memory_mb=64)
        for one in self.at_once(4, flavor):
            self.settled(one)
        go_on, spawn = threading.Event(), fake.FakeDriver.spawn

        def spawned(*arguments: Any, **named: Any) -> Any:
            go_on.wait(PATIENCE)
            return spawn(*arguments, **named)

        with mock.patch.object(fake.FakeDriver, "spawn", spawned):
            made = self.at_once(6, flavor)
            for one in made:
                self._wait_for_server_parameter(one, {"OS-EXT-STS:task_state": "spawning"}, max_retries=PATIENCE)
            running[0].end(signal.SIGTERM)
            go_on.set()
            for one in made:
                self.settled(one)
        made = self.at_once(4, flavor)
        self.servers.start_front()
        for one in made + self.at_once(4, flavor):
            self.settled(one)
        self.assertEqual({}, self.held_twice())

    def test_the_only_one(self) -> None:
        self.lost_none(1)

    def test_one_of_two(self) -> None:
        self.lost_none(2)


class Beside(Schedulers):
    """Several schedulers on one queue, and a broker that restarts."""

    def test_two_fronts_and_a_stock_scheduler(self) -> None:
        for start in (self.servers.start_front, self.servers.start_front, self.servers.start_stock):
            start()
        flavor = self.flavor(memory_mb=512)
        for _ in range(3):
            for one in self.at_once(4, flavor):
                self.settled(one)
        self.assertEqual({}, self.held_twice())

    def test_the_broker_restarts(self) -> None:
        """What is in its queues is gone, for any scheduler. What was not lost is held once, and all goes on."""
        self.servers.start_front()
        flavor = self.flavor(memory_mb=512)
        made = self.at_once(6, flavor)
        self.servers.restart_broker()
        after = self._after_the_restart(flavor)
        for one in made:
            if self.api.get_server(one["id"])["status"] == "ACTIVE":
                self.assert_claimed(one)
            self._delete_server(one)
        self.settled(after)
        self.assertEqual({}, self.held_twice())

    def _after_the_restart(self, flavor: str) -> Server:
        """A server that was asked for once Nova's own services had their connections again."""
        for _ in range(10):
            server = self.request(flavor=flavor)
            until = time.monotonic() + 20 * STEP_S
            while time.monotonic() < until:
                if self.api.get_server(server["id"])["status"] != "BUILD":
                    return server
                time.sleep(STEP_S)
        raise AssertionError("no server was built after the broker had restarted")

    def test_switched_over_and_back_under_load(self) -> None:
        """No server is lost but by the stock scheduler: what it has in hand when it ends gets no answer, beside another
        stock one as beside a front.
        """
        stock = self.servers.start_stock()
        made: list[Server] = []
        ended = threading.Event()
        flavor = self.flavor(memory_mb=64)

        def ask() -> None:
            while not ended.is_set():
                made.append(self.request(flavor=flavor))
                time.sleep(STEP_S)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            time.sleep(2 * STEP_S)
            front = self.servers.start_front()
            asked = len(made)
            stock.end(signal.SIGTERM)
            of_stock = range(asked - 1, len(made) + 1)
            time.sleep(4 * STEP_S)
            self.servers.start_stock()
            front.end(signal.SIGTERM)
            time.sleep(4 * STEP_S)
        finally:
            ended.set()
            asking.join()
        for number, one in enumerate(made):
            if number not in of_stock or self.ended(one)["status"] == "ACTIVE":
                self.settled(one)
        self.assertEqual({}, self.held_twice())
