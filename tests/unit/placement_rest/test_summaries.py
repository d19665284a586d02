"""Texts that are kept equal texts made anew, whatever has happened to the providers since."""

from __future__ import annotations

import random

import msgspec
import pytest

from bus.contracts.feed import Change
from bus.contracts.placement import ProviderState
from placement_worker.replica.book import Book
from placement_worker.replica.candidates import CandidatesRequest, Group, candidates
from placement_worker.replica.copies import copy_of
from placement_worker.rest.summaries import summaries

REQUEST = CandidatesRequest(groups=(Group(resources={"VCPU": 1}),))


def uuid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def state(rng: random.Random, number: int, generation: int) -> ProviderState:
    host = number % 40
    parent = None if number < 40 else uuid(host)
    names = rng.sample(["VCPU", "MEMORY_MB", "CUSTOM_A", "CUSTOM_B"], rng.randint(1, 4))
    return ProviderState(
        uuid=uuid(number),
        name=f"p{number}",
        root_uuid=uuid(host),
        parent_uuid=parent,
        generation=generation,
        shape=generation,
        inventories={name: (float(rng.randint(50, 60)), 1, 60, 1, 60, 0, 1.0) for name in names},
        used={name: rng.randint(0, 3) for name in names},
        traits=tuple(sorted(rng.sample(["HW_CPU_X86_AVX", "CUSTOM_X", "CUSTOM_Y"], rng.randint(0, 3)))),
    )


@pytest.mark.parametrize("version", [16, 26, 28, 29, 39])
def test_what_is_kept_is_what_would_be_made_anew(version: int) -> None:
    rng = random.Random(version)
    book = Book()
    known = dict.fromkeys(range(120), 1)
    book.load([state(rng, number, 1) for number in known], 0)
    for round_ in range(60):
        for _ in range(rng.randint(0, 6)):
            number = rng.choice([*known, 200 + rng.randint(0, 1500)])
            generation = known.get(number, 0)
            how = rng.random()
            if how < 0.5 and number in known:  # a DELETE moves usage, and no generation
                change = Change(
                    sequence=0, provider=uuid(number), generation=generation, used={"VCPU": rng.randint(0, 9)}
                )
            elif how < 0.6 and number >= 40 and number in known:
                change = Change(sequence=0, provider=uuid(number), generation=generation, removed=True)
                del known[number]
            else:
                known[number] = generation + 1
                change = Change(
                    sequence=0,
                    provider=uuid(number),
                    generation=generation + 1,
                    state=state(rng, number, generation + 1),
                )
            assert book.apply([msgspec.structs.replace(change, sequence=book.sequence + 1)]) is None
        if round_ == 30:  # a snapshot deals all rows anew
            numbers = rng.sample(sorted(known), len(known))
            known = {number: known[number] for number in numbers}
            book.load([state(rng, number, generation) for number, generation in known.items()], book.sequence)
        anew = copy_of(book)
        kept = summaries(book, candidates(book, REQUEST), {"VCPU"}, version)
        fresh = summaries(anew, candidates(anew, REQUEST), {"VCPU"}, version)
        assert msgspec.json.decode(b"{" + kept + b"}") == msgspec.json.decode(b"{" + fresh + b"}")
        assert kept


def test_a_class_that_is_used_without_inventory_is_not_announced() -> None:
    """A provider of the same classes that has inventory of it once lent it a capacity of 0."""
    book = Book()
    one, other = (
        ProviderState(
            uuid=uuid(number),
            name=f"p{number}",
            root_uuid=uuid(number),
            generation=1,
            shape=1,
            inventories=dict.fromkeys(names, (8.0, 1, 8, 1, 8, 0, 1.0)),
            used={"VCPU": 1, "CUSTOM_A": 1},
        )
        for number, names in ((1, ("VCPU", "CUSTOM_A")), (2, ("VCPU",)))
    )
    book.load([one, other], 0)
    answer = msgspec.json.decode(b"{" + summaries(book, candidates(book, REQUEST), {"VCPU"}, 39) + b"}")
    assert {key: sorted(each["resources"]) for key, each in answer.items()} == {
        uuid(1): ["CUSTOM_A", "VCPU"],
        uuid(2): ["VCPU"],
    }
