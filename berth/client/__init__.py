"""The client of `/api/v1`: typed, for programs and the command line. docs/use/client.md has examples.

    with Client("https://berth.example", token) as berth:
        accepted = berth.create_build({"flavor": "m1.small"})
        for item in berth.follow_build(accepted.instance_uuid):
            print(item.state)

It imports neither a broker's library nor a database's.
"""

from berth.client.event_feed import Reconnected
from berth.client.faults import ApiAddressInvalid, ApiAnswerInvalid, ApiProblem, ApiTimeout, ApiUnavailable
from berth.client.http import AsyncClient, Client
from berth.client.object_operations import ObjectChangeOptions

__all__ = (
    "ApiAddressInvalid",
    "ApiAnswerInvalid",
    "ApiProblem",
    "ApiTimeout",
    "ApiUnavailable",
    "AsyncClient",
    "Client",
    "ObjectChangeOptions",
    "Reconnected",
)
