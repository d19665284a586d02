"""The few names and UUIDs that all requests are made of, and what of them is known to be there."""

from __future__ import annotations

import json
import uuid
from typing import Any

from calls import Call


def _uuid(kind: int, number: int) -> str:
    """A UUID with letters in it, so that upper and lower case differ."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{kind}/{number}"))


PROVIDERS = [_uuid(1, number) for number in range(14)]
CONSUMERS = [_uuid(2, number) for number in range(6)]
AGGREGATES = [_uuid(3, number) for number in range(4)]
CUSTOM_TRAITS = ["CUSTOM_GOLD", "CUSTOM_SILVER", "CUSTOM_RACK_1"]
SHARES = "MISC_SHARES_VIA_AGGREGATE"
TRAITS = [*CUSTOM_TRAITS, SHARES, "HW_CPU_X86_AVX2", "STORAGE_DISK_SSD"]
CUSTOM_CLASSES = ["CUSTOM_FPGA_A", "CUSTOM_BAREMETAL"]
CLASSES = ["VCPU", "MEMORY_MB", "DISK_GB", "SRIOV_NET_VF", *CUSTOM_CLASSES]
ODD_NAMES = ["CUSTOM_NOT_THERE", "NOT_STANDARD", "custom_lower", "CUSTOM_", "VCPU ", "CUSTOM_ü", "C" * 256]
PROJECTS = ["project-a", "project-b"]
USERS = ["user-a", "user-b"]
CONSUMER_TYPES = ["INSTANCE", "MIGRATION", "VOLUME"]
MAX_OFFERED = 40


class World:
    """The objects that a sequence has made so far, roughly: providers with their classes, and candidates that were
    offered.
    """

    def __init__(self) -> None:
        self.sent = 0
        self.providers: dict[str, set[str]] = {}
        self.offered: list[dict[str, Any]] = []

    def note(self, call: Call, status: int, answer: Any) -> None:
        """Learn from an answer."""
        self.sent += 1
        if status >= 300:
            return
        _, first, *rest = call.path.partition("?")[0].split("/")
        if first == "allocation_candidates" and call.minor >= 12 and answer:
            # In an order of ours, and all of them: which ones a limit leaves differs from run to run.
            offered = sorted(answer["allocation_requests"], key=lambda one: json.dumps(one, sort_keys=True))
            if offered and "limit=" not in call.path:
                self.offered = offered[:MAX_OFFERED]
        if first != "resource_providers":
            return
        if call.method == "POST" and not rest and isinstance(call.body, dict) and "uuid" in call.body:
            self.providers.setdefault(str(uuid.UUID(call.body["uuid"])), set())
        elif call.method == "DELETE" and len(rest) == 1:
            self.providers.pop(rest[0], None)
        elif len(rest) == 2 and rest[1] == "inventories" and answer and "inventories" in answer:
            self.providers[rest[0]] = set(answer["inventories"])
