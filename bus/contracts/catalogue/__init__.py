"""The catalogue: one row a message, one row a queue. Topology, permissions and the reference page are derived from it.

Two kinds of bus: the API bus, and one bus per cell. Both have the same exchanges. A placeholder in a
routing key (`{project_id}`) is a field of the message; one in a queue name (`{service}`) is given by its consumer.
"""

from bus.contracts.catalogue.lanes import LANE, LANES, lane_of
from bus.contracts.catalogue.lookup import (
    BY_QUEUE,
    BY_TYPE,
    ENDED_BY_LETTER,
    OF_PROJECT,
    TAKES_GIVEN_UP,
    destination,
    may_come_under,
    project_of,
    projects_key,
    routing_key,
    taken_by,
    why_not_under,
)
from bus.contracts.catalogue.messages import MESSAGES, REPLIES
from bus.contracts.catalogue.queues import (
    BUILD_EVENTS,
    MAX_REQUESTS_PER_MESSAGE,
    MAX_WAITING_BYTES,
    MAX_WAITING_MESSAGES,
    QUEUES,
    RETRY_S,
)
from bus.contracts.catalogue.rights import FORBIDDEN, OPERATORS, forbidden, operators_rights
from bus.contracts.catalogue.rows import (
    COMMANDS,
    DEAD,
    DEAD_LETTERS,
    DELAY,
    DELAYED,
    EVENTS,
    GIVEN_UP,
    RETURN,
    MessageRow,
    QueueKind,
    QueueRow,
    Where,
)

__all__ = [
    "BUILD_EVENTS",
    "BY_QUEUE",
    "BY_TYPE",
    "COMMANDS",
    "DEAD",
    "DEAD_LETTERS",
    "DELAY",
    "DELAYED",
    "ENDED_BY_LETTER",
    "EVENTS",
    "FORBIDDEN",
    "GIVEN_UP",
    "LANE",
    "LANES",
    "MAX_REQUESTS_PER_MESSAGE",
    "MAX_WAITING_BYTES",
    "MAX_WAITING_MESSAGES",
    "MESSAGES",
    "OF_PROJECT",
    "OPERATORS",
    "QUEUES",
    "REPLIES",
    "RETRY_S",
    "RETURN",
    "TAKES_GIVEN_UP",
    "MessageRow",
    "QueueKind",
    "QueueRow",
    "Where",
    "destination",
    "forbidden",
    "lane_of",
    "may_come_under",
    "operators_rights",
    "project_of",
    "projects_key",
    "routing_key",
    "taken_by",
    "why_not_under",
]
