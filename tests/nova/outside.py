"""Nova's test fixtures with the scheduler outside the test's process: RabbitMQ between them, berth's placement beside.

Run by Nova's own interpreter, not by berth's. Each class stands in for the fixture of `nova.tests` that it derives
from, and leaves to it all that stays the same. Two that name themselves in `super()` are changed in place instead.
"""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fixtures
import front_settings
import oslo_messaging._drivers.impl_fake  # noqa: F401  (Nova's fixture empties it at its end)
from nova import policy
from nova.conf import CONF
from nova.db.api import api as api_db_api
from nova.scheduler import rpcapi
from nova.scheduler.filters import HostFilterHandler
from nova.tests import fixtures as nova_fixtures
from nova.tests.functional import fixtures as functional_fixtures
from oslo_config import cfg
from oslo_messaging import conffixture
from oslo_serialization import jsonutils
from placement_options import name_a_database
from world import World

# The package has the name `nova` for another module.
module = importlib.import_module("nova.tests.fixtures.nova")

WORLDS: list[World] = []  # one, after `install`


class ReachedInto(Exception):
    """A test reaches into the scheduler, which is not in its process."""


def world() -> World:
    """Set by `install`."""
    return WORLDS[0]


class Tickets:
    """Objects that cannot cross RabbitMQ, by names that can."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._objects: dict[str, Any] = {}

    def give(self, thing: Any) -> str | None:
        """A name of it; None has none."""
        if thing is None:
            return None
        name = f"ticket-{next(self._numbers)}"
        self._objects[name] = thing
        return name

    def take(self, name: str | None) -> Any:
        """The thing of that name, any number of times."""
        return None if name is None else self._objects.get(name)


TICKETS = Tickets()
CARRIED = ("db_connection", "mq_connection")


def pass_by_ticket() -> None:
    """Contexts take their database and transport along by name: they are objects of this process."""
    serializer = module.CheatingSerializer
    serialize, deserialize = serializer.serialize_context, serializer.deserialize_context

    def serialize_context(self: Any, context: Any) -> dict[str, Any]:
        values: dict[str, Any] = serialize(self, context)
        return values | {key: TICKETS.give(values[key]) for key in CARRIED}

    def deserialize_context(self: Any, values: dict[str, Any]) -> Any:
        return deserialize(self, values | {key: TICKETS.take(values.get(key)) for key in CARRIED})

    serializer.serialize_context, serializer.deserialize_context = serialize_context, deserialize_context


class RPCFixture(module.RPCFixture):  # type: ignore[misc]
    """On the test's vhost instead of in memory."""

    def setUp(self) -> None:
        world().servers.open()
        setter = conffixture.ConfFixture.transport_url.fset
        amqp = world().servers.urls["main"].replace("amqp://", "rabbit://")
        url = property(conffixture.ConfFixture.transport_url.fget, lambda fixture, _: setter(fixture, amqp))
        with mock.patch.object(conffixture.ConfFixture, "transport_url", url):
            super().setUp()


def place_in_berth() -> None:
    """PlacementFixture is the live berth instead of an application in this process."""
    fixture = functional_fixtures.PlacementFixture
    make, set_up = fixture.__init__, fixture.setUp

    def prepare(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named | {"db": False, "use_intercept": False})
        self.endpoint = world().servers.placement

    def setUp(self: Any) -> None:
        world().servers.wait_placement()
        set_up(self)

    fixture.__init__, fixture.setUp = prepare, setUp
    name_a_database()


def let_the_front_read() -> None:
    """Whatever policy a test sets for the users of its API, the front's own may read there."""
    authorize = policy.authorize

    def authorized(*arguments: Any, **named: Any) -> Any:
        compute = world().servers.compute
        return (compute is not None and compute.calls) or authorize(*arguments, **named)

    policy.authorize = authorized


class OSAPIFixture(module.OSAPIFixture):  # type: ignore[misc]
    """Also on a real port. The fixtures of a test's later APIs replace the first one's: all have the same data."""

    def setUp(self) -> None:
        super().setUp()
        compute = world().servers.compute
        assert compute is not None
        compute.app = self.app()


class PassedByReaders(module.ReaderWriterLock):  # type: ignore[misc]
    """A lock whose readers wait for no writer that waits itself. Behind one, a service that reports its state waits
    with the lock of its database's writers, for which readers may wait: the test stood still for ever.
    """

    has_pending_writers = False


class CellDatabases(module.CellDatabases):  # type: ignore[misc]
    """Tells where the cells' databases are."""

    urls: dict[str, str] = {}

    def __init__(self) -> None:
        super().__init__()
        self._cell_lock = PassedByReaders()

    def add_cell_database(self, connection_str: str, default: bool = False) -> None:
        super().add_cell_database(connection_str, default)
        engine = self._ctxt_mgrs[connection_str].writer.get_engine()
        CellDatabases.urls[connection_str] = engine.url.render_as_string(hide_password=False)


class SchedulerOutside:
    """What a test holds for the service that it has started."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """The scheduler answers from here on."""
        world().servers.start_scheduler(cloud)

    def stop(self) -> None:
        """The scheduler answers no more."""
        world().servers.stop_scheduler()

    kill = stop

    @property
    def manager(self) -> Any:
        """Just the classes of its filters, for tests that set a spy on one: in this process it sees nothing."""
        classes = HostFilterHandler().get_matching_classes(CONF.filter_scheduler.available_filters)
        return SimpleNamespace(host_manager=SimpleNamespace(filter_cls_map={one.__name__: one for one in classes}))

    def __getattr__(self, name: str) -> Any:
        raise ReachedInto(f"the test reaches into the scheduler's process: service.{name}")


class ServiceFixture(module.ServiceFixture):  # type: ignore[misc]
    """Starts no nova-scheduler in this process."""

    def setUp(self) -> None:
        if self.kwargs["binary"] != "nova-scheduler":
            super().setUp()
            return
        fixtures.Fixture.setUp(self)
        self.service = SchedulerOutside()
        self.addCleanup(self.service.kill)


def cloud() -> dict[str, Any]:
    """What a nova-scheduler in another process has to know of this test's cloud: settings, databases, weights."""
    settings = []
    for group, options in [(None, CONF._opts), *((name, part._opts) for name, part in CONF._groups.items())]:
        for option in options.values():
            value = option.get("override", option.get("default", cfg.Opt))
            if value is cfg.Opt or option["opt"].dest == "host":  # which changes with each service that is started
                continue
            try:
                settings.append([group, option["opt"].dest, json.loads(json.dumps(value))])
            except TypeError:
                continue  # an object of this process
    # A mock while the fixture of that weigher is in use.
    weights = getattr(module.HostNameWeigher.get_weights, "return_value", None)
    return {
        "settings": settings,
        "front": front_settings.settings_of(CONF, weights),
        "weights": weights,
        "cells": CellDatabases.urls,
        "api_database": api_db_api.get_engine().url.render_as_string(hide_password=False),
    }


class Calls:
    """How often the present test has asked for destinations. What it asked with is appended to a file, a line each."""

    def __init__(self, specs: Path) -> None:
        self.count = 0
        real = rpcapi.SchedulerAPI.select_destinations

        def counted(*arguments: Any, **named: Any) -> Any:
            self.count += 1
            note(specs, *arguments, **named)
            if WORLDS:
                world().servers.keep_up(cloud)
            return real(*arguments, **named)

        rpcapi.SchedulerAPI.select_destinations = counted


def note(specs: Path, _api: Any, _context: Any, spec_obj: Any, *_: Any, **_named: Any) -> None:
    """Append a RequestSpec and the settings that shape its query; one that holds a test's stand-ins is left out."""
    try:
        line = jsonutils.dumps({"spec": spec_obj.obj_to_primitive(), "settings": front_settings.of_queries(CONF)})
    except Exception:
        return
    with specs.open("a") as file:
        file.write(line + "\n")


def install(chosen: World) -> None:
    """From here on tests use these fixtures."""
    WORLDS[:] = [chosen]
    for own in (RPCFixture, OSAPIFixture, CellDatabases, ServiceFixture):
        setattr(nova_fixtures, own.__name__, own)
    pass_by_ticket()
    let_the_front_read()
    place_in_berth()
