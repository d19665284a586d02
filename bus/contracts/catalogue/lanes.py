"""The lanes of clients' requests: a project's requests wait in one of them, beside those of few other projects.

The lane is a word of the routing key before that of the project, so the broker's permissions bind a project to its lane
(docs/decisions/0025-lanes-of-projects.md).
"""

from __future__ import annotations

import zlib

# A client computes its lane from this number. Another number makes other routing keys, for each client and each user's
# permissions.
LANES = 32

# The placeholder of the lane in a routing key, a binding key and a queue's name.
LANE = "{lane}"


def lane_of(project_id: str) -> int:
    """Return the lane of a project: the CRC-32 of its id, as in gzip and PNG, modulo the number of lanes."""
    return zlib.crc32(project_id.encode()) % LANES
