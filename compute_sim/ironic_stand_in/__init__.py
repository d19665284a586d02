"""A small Ironic for demonstrations and tests: real HTTP, simulated nodes, notifications of the true shape."""

from __future__ import annotations

from compute_sim.ironic_stand_in.announcer import (
    EXCHANGE,
    AmqpAnnouncer,
    MemoryAnnouncer,
    NotificationAnnouncer,
    Silent,
)
from compute_sim.ironic_stand_in.node_pool import Behaviour, NodePool, RequestError
from compute_sim.ironic_stand_in.replay import replay
from compute_sim.ironic_stand_in.server import IronicStandIn

__all__ = [
    "EXCHANGE",
    "AmqpAnnouncer",
    "Behaviour",
    "IronicStandIn",
    "MemoryAnnouncer",
    "NodePool",
    "NotificationAnnouncer",
    "RequestError",
    "Silent",
    "replay",
]
