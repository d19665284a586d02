"""The methods of topic `scheduler`, and of every service of Nova: which there are, in which versions."""

from __future__ import annotations

from collections.abc import Mapping

from nova_scheduler.wire.envelope import Call, no_such_method, no_valid_host, unsupported_version
from nova_scheduler.wire.queues import TOPIC

# Nova's scheduler API is 4.5. Calls of select_destinations before it name no instances, or want no Selection objects,
# and are of Novas before Queens.
MAJOR, NEWEST_MINOR = 4, 5
OLDEST_MINOR: Mapping[str, int] = {
    "select_destinations": 5,
    "update_aggregates": 1,
    "delete_aggregate": 1,
    "update_instance_info": 2,
    "delete_instance_info": 2,
    "sync_instance_info": 2,
}
BASE_API = "baseapi"  # the namespace of what each of Nova's services answers
PING = "oslo_rpc_server_ping"


def result_of_base(call: Call) -> tuple[object] | None:
    """The result of what each server answers, in a tuple; None for another method."""
    if call.namespace == BASE_API and call.method == "ping":
        return ({"service": TOPIC, "arg": call.arguments.get("arg")},)
    if call.namespace == BASE_API and call.method == "get_backdoor_port":
        return (None,)
    return ("pong",) if call.method == PING and not call.namespace else None


def check_method(call: Call) -> None:
    """Raises RemoteFault: there is no such method, or not in this version; or the call cannot be read."""
    if call.unread:
        raise no_valid_host(f"The scheduler cannot read the call: {call.unread}.")
    oldest = OLDEST_MINOR.get(call.method)
    numbers = [int(number) for number in call.version.split(".")]
    newest = f"{MAJOR}.{NEWEST_MINOR}"
    if call.namespace or numbers[0] != MAJOR or (numbers[1:2] or [0])[0] > NEWEST_MINOR:
        raise unsupported_version(call.method, call.version, newest)
    if oldest is None:
        raise no_such_method(call.method)
    if (numbers[1:2] or [0])[0] < oldest:
        raise unsupported_version(call.method, call.version, f"{MAJOR}.{oldest} to {newest}")


def label_of(call: Call) -> str:
    """The method as a label of a metric: one that is known."""
    return call.method if call.method in OLDEST_MINOR else "ping" if result_of_base(call) is not None else "other"
