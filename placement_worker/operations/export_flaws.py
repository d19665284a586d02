"""Finds the errors of an imported book before anything of it is written."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator

from bus.contracts.base import MAX_AMOUNT
from placement_worker.domain.names import MAX_NAME
from placement_worker.domain.server_groups import GroupMember
from placement_worker.domain.values import ConsumerState, Provider, StoredInventory

MAX_NUMBER = 2**62  # the bound of generations and amounts, far below the largest number that the database can add to

_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_NAME = re.compile(r"[A-Z0-9_]+")


def flaw_of_names(names: Iterable[str]) -> str | None:
    """Return why one of these cannot be a resource class or trait, or None."""
    return next((f"{name!r} is no class or trait" for name in names if not _is_name(name)), None)


def flaw_of_provider(provider: Provider) -> str | None:
    """Return the error of a provider that can be found without the others, or None."""
    uuids = [provider.uuid, provider.root, *provider.aggregates]
    for uuid in [*uuids, provider.parent] if provider.parent is not None else uuids:
        if _UUID.fullmatch(uuid) is None:
            return f"{uuid!r} is no uuid"
    if not _is_text(provider.name):
        return f"{provider.uuid} has no name"
    if not 0 <= provider.generation <= MAX_NUMBER or not 0 <= provider.shape <= MAX_NUMBER:
        return f"{provider.uuid} has a generation out of bounds"
    for name, inventory in provider.inventories.items():
        for what in _flaws_of_inventory(inventory):
            return f"{name} of {provider.uuid}: {what}"
    return flaw_of_names((*provider.inventories, *provider.traits, *provider.lasting))


def flaw_of_consumer(uuid: str, consumer: ConsumerState) -> str | None:
    """Return why this cannot be a consumer with allocations, or None."""
    if _UUID.fullmatch(uuid) is None:
        return f"{uuid!r} is no uuid"
    if not 0 <= consumer.generation <= MAX_NUMBER or not 0 <= consumer.attempt <= MAX_AMOUNT:
        return f"{uuid} has a generation or an attempt out of bounds"
    if not (_is_text(consumer.project_id) and _is_text(consumer.user_id)):
        return f"{uuid} has no project or no user"
    if consumer.consumer_type and not _is_name(consumer.consumer_type):
        return f"{uuid}: {consumer.consumer_type!r} is no type of consumers"
    amounts = [amount for resources in consumer.holding.values() for amount in resources.values()]
    if not amounts or not all(1 <= amount <= MAX_NUMBER for amount in amounts):
        return f"{uuid} holds nothing, or amounts that no consumer can hold"
    return None


def flaw_of_member(member: GroupMember, consumers: Container[str]) -> str | None:
    """Return why this cannot be a member of a server group, or None."""
    for uuid in (member.group, member.consumer):
        if _UUID.fullmatch(uuid) is None:
            return f"{uuid!r} is no uuid"
    if not _is_text(member.project):
        return f"the group {member.group} has no project"
    return None if member.consumer in consumers else f"{member.consumer} is in a group and holds nothing"


def _flaws_of_inventory(inventory: StoredInventory) -> Iterator[str]:
    for name in ("total", "min_unit", "max_unit", "step_size"):
        if not 1 <= getattr(inventory, name) <= MAX_AMOUNT:
            yield f"{name} is out of bounds"
    if not 0 <= inventory.reserved <= MAX_AMOUNT:
        yield "reserved is out of bounds"
    if not -MAX_NUMBER <= inventory.capacity <= MAX_NUMBER:
        yield "capacity is out of bounds"


def _is_name(name: str) -> bool:
    return len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None


def _is_text(text: str) -> bool:
    return 1 <= len(text) <= MAX_NAME and "\x00" not in text
