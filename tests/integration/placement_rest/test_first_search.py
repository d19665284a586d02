"""The first search of a process makes as many calls as each later one: what is initialised once is so before."""

from __future__ import annotations

import json
import subprocess
import sys

from bus.clock import SystemClock
from placement_worker.replica.warm_up import warm_up_search
from placement_worker.rest.candidates import warm_up
from placement_worker.store.memory_table import MemoryBookTable
from tests.integration.placement_rest.conftest import serving

# Prints the calls of searches that differ in their amounts, each of a new book, in a new process.
COUNTED = """
import json, sys
from bus.contracts.placement import ProviderState
from placement_worker.replica.book import Book
from placement_worker.replica.candidates import candidates
from placement_worker.replica.tree_solver import TimeBudget
from placement_worker.rest import candidates as route
from placement_worker.rest.candidates_query import parse_candidates
from placement_worker.rest.http import QueryString

def host(number):
    uuid, offered = f"00000000-0000-0000-0000-{number:012}", (9.0, 1, 9, 1, 9, 0, 1.0)
    return ProviderState(
        uuid=uuid, name=uuid, parent_uuid=None, root_uuid=uuid, generation=1, shape=1,
        inventories={"VCPU": offered, "MEMORY_MB": offered}, used={}, traits=(), aggregates=())

def answered(book, amount):
    requested = parse_candidates(QueryString(b"resources=VCPU:1,MEMORY_MB:%d&limit=10" % amount), 39)
    budget = TimeBudget(lambda: 0.0, 1.0, keeps_partial=True)
    found = candidates(book, requested.request, limit=10, rng=None, budget=1000, time_budget=budget)
    route._rendered(book, found, requested, 39, budget)

def calls_of(act, amount):
    book, calls = Book(), [0]
    book.load([host(number) for number in range(3)], 1)

    def count(_frame, event, _argument):
        calls[0] += event in {"call", "c_call"}

    sys.setprofile(count)
    act(book, amount)
    sys.setprofile(None)
    return calls[0]

"""


def calls(rest: str) -> list[int]:
    ran = subprocess.run([sys.executable, "-c", COUNTED + rest], capture_output=True, text=True, check=True, timeout=60)
    counted: list[int] = json.loads(ran.stdout)
    return counted


def test_item_19_the_first_search_of_a_process_makes_the_calls_of_each_later_one() -> None:
    first, *later = calls("route.warm_up()\nprint([calls_of(answered, amount) for amount in range(1, 4)])")
    assert [first, *later] == [first] * 3


async def test_item_19_a_server_is_ready_after_its_warm_up() -> None:
    warm_up.cache_clear()
    warm_up_search.cache_clear()
    async with serving(MemoryBookTable(SystemClock())):
        assert warm_up.cache_info().currsize == warm_up_search.cache_info().currsize == 1
