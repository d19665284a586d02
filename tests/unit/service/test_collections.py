"""How much a garbage collection of a worker examines while the event loop waits."""

from __future__ import annotations

import gc

from bus.service.main import GC_THRESHOLD

KEPT = 200_000
MOST_EXAMINED = 25_000


def test_item_16_a_collection_examines_so_many_new_objects_and_the_others_seldom() -> None:
    """A scheduler of 40,000 hosts that took 4,000 builds at once stood still for 60 ms, over 50,000 objects."""
    examined: list[int] = []
    older: list[int] = []

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start" and about["generation"]:
            older.append(about["generation"])
        elif phase == "start":
            examined.append(len(gc.get_objects(0)))

    before = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(note)
    gc.set_threshold(*GC_THRESHOLD)
    try:
        kept: list[list[int]] = [[] for _ in range(KEPT)]
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
    assert len(kept) == KEPT
    assert examined and max(examined) <= MOST_EXAMINED
    assert older == []
