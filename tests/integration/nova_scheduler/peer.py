"""One of Nova's services, run by the Python of Nova's virtualenv: its own RPC client of the scheduler, or a server.

`peer.py client URL [OPTION=VALUE ...]` and `peer.py server URL`. OPTION: of `[oslo_messaging_rabbit]`. A line of JSON
on standard input is a command, a line on standard output its outcome with its `id`; commands run side by side.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

os.environ["OS_NOVA_DISABLE_EVENTLET_PATCHING"] = "1"

import oslo_messaging as messaging
from nova import conf, context, exception, objects, rpc
from nova.baserpc import BaseAPI
from nova.objects.base import NovaObjectSerializer
from nova.scheduler.rpcapi import SchedulerAPI

CONF = conf.CONF
SPEC = {
    "project_id": "p",
    "num_instances": 1,
    "image": None,
    "numa_topology": None,
    "pci_requests": None,
    "retry": None,
    "limits": None,
    "ignore_hosts": None,
    "force_hosts": None,
    "force_nodes": None,
    "availability_zone": None,
    "instance_group": None,
    "requested_destination": None,
    "scheduler_hints": {},
}
spoken = threading.Lock()


def say(**said: object) -> None:
    with spoken:
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


def configure(url: str, options: list[str]) -> None:
    rpc.set_defaults(control_exchange="nova")
    CONF([], project="nova", version="test", default_config_files=[])
    messaging.get_rpc_transport(CONF, url=url)  # registers the options
    CONF.set_override("transport_url", url)
    for option in options:
        name, _, value = option.partition("=")
        CONF.set_override(name, json.loads(value), group="oslo_messaging_rabbit")
    objects.register_all()
    rpc.init(CONF)
    SchedulerAPI()  # registers the options of clients


def select(command: dict[str, object]) -> object:
    CONF.set_override("rpc_response_timeout", command.get("monitor_s", 60))
    CONF.set_override("long_rpc_timeout", command.get("limit_s", 120))
    flavor = objects.Flavor(flavorid="1", name="m", vcpus=1, memory_mb=1, root_gb=1, ephemeral_gb=0, swap=0)
    spec = objects.RequestSpec(flavor=flavor, **SPEC)
    found = SchedulerAPI().select_destinations(user(command), spec, command["uuids"], True, True)
    assert all(isinstance(one, objects.Selection) for row in found for one in row)
    return [[one.service_host for one in row] for row in found]


def user(command: dict[str, object]) -> context.RequestContext:
    return context.RequestContext(user_id="u", project_id="p", request_id=command.get("request_id"))


def call(command: dict[str, object]) -> object:
    """A method by name, as an older or another client calls it."""
    target = messaging.Target(topic="scheduler", version="1.0", namespace=command.get("namespace"))
    client = rpc.get_client(target, serializer=NovaObjectSerializer())
    if command.get("server"):
        client = client.prepare(server=command["server"])
    prepared = client.prepare(version=command["version"], timeout=command.get("limit_s", 60))
    return prepared.call(user(command), command["method"], **command.get("arguments", {}))


def casts(command: dict[str, object]) -> object:
    api = SchedulerAPI()
    aggregate = objects.Aggregate(id=1, name="a", hosts=["h"], metadata={})
    api.update_aggregates(user(command), [aggregate])
    api.delete_instance_info(user(command), "h", "uuid")
    api.sync_instance_info(user(command), "h", ["uuid"])
    api.delete_aggregate(user(command), aggregate)
    return "sent"


def ping(command: dict[str, object]) -> object:
    return BaseAPI(topic="scheduler").ping(user(command), "there?", timeout=60)


COMMANDS = {"select": select, "call": call, "casts": casts, "ping": ping}


def carry_out(command: dict[str, object]) -> None:
    try:
        say(id=command["id"], result=COMMANDS[command["do"]](command))
    except Exception as error:  # the test looks at it
        kinds = [kind.__name__ for kind in type(error).__mro__]
        said = {"kinds": kinds, "module": type(error).__module__, "text": str(error)}
        said["kind"] = getattr(error, "exc_type", type(error).__name__)
        say(id=command["id"], raised=said, keywords=getattr(error, "kwargs", {}))


class Stock:
    """The part of a stock nova-scheduler that its clients see. What it is to do is in the request's id."""

    target = messaging.Target(version="4.5")

    @messaging.expected_exceptions(exception.NoValidHost)
    def select_destinations(self, ctxt, spec_obj, instance_uuids, return_objects=False, return_alternates=False):  # type: ignore[no-untyped-def]
        assert isinstance(spec_obj, objects.RequestSpec)
        say(taken="select_destinations", request_id=ctxt.request_id, uuids=instance_uuids)
        if ctxt.request_id == "req-none":
            raise exception.NoValidHost(reason="stock has none")
        if ctxt.request_id == "req-slow":
            time.sleep(5)
        return [[objects.Selection(service_host="stock", limits=None, nodename="stock", compute_node_uuid=uuid,
                                   cell_uuid=uuid, allocation_request=None, allocation_request_version=None,
                                   availability_zone=None)] for uuid in instance_uuids]  # fmt: skip

    def update_aggregates(self, ctxt, aggregates):  # type: ignore[no-untyped-def]
        say(taken="update_aggregates", hosts=[one.hosts for one in aggregates])


def serve() -> None:
    server = rpc.get_server(
        messaging.Target(topic="scheduler", server="stock"), [Stock()], serializer=NovaObjectSerializer()
    )
    server.start()
    say(ready=True)
    sys.stdin.read()
    server.stop()


def main() -> None:
    role, url, *options = sys.argv[1:]
    configure(url, options)
    if role == "server":
        serve()
        return
    say(ready=True)
    for line in sys.stdin:
        threading.Thread(target=carry_out, args=(json.loads(line),), daemon=True).start()


if __name__ == "__main__":
    main()
