"""A simulated Ironic as a process of its own, with counters and troubles that a benchmark orders over HTTP.

    python -m lab.benchmarks.metal_ironic --nodes 10000 --broker amqp://... --port 6385

Beside Ironic's API: `GET /bench/counts` {request: count}, `POST /bench/trouble?workers=100&locked=0.1` (more nodes than
that on their way: 503, as a conductor without free workers answers; so large a share of changes: 409, a lock).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from bus.clock import SystemClock
from compute_sim.ironic_stand_in import AmqpAnnouncer, Behaviour, IronicStandIn

BEHAVIOUR = Behaviour(deploy_s=5.0, undeploy_s=1.0, clean_s=2.0)
CHANGES = frozenset({"PUT", "PATCH", "POST", "DELETE"})


class MeteredIronic(IronicStandIn):
    """Counts every request, and turns some down as a busy Ironic does."""

    counts: Counter[str]
    workers: int = 1_000_000
    locked: float = 0.0

    def app(self) -> Starlette:
        """The API, metered, and the benchmark's own routes."""
        self.counts = Counter()
        self._dice = random.Random(1)
        made = super().app()
        made.router.routes.extend(
            [
                Route("/bench/counts", self._counts),
                Route("/bench/trouble", self._trouble, methods=["POST"]),
            ]
        )
        made.add_middleware(BaseHTTPMiddleware, dispatch=self._meter)
        return made

    async def _meter(self, request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        if request.url.path.startswith("/bench"):
            return await answer(request)
        name = f"{request.method} {kind_of(request.url.path)}"
        self.counts[name] += 1
        refused = self._refusal(request)
        if refused is not None:
            self.counts[f"{refused.status_code}"] += 1
            return refused
        return await answer(request)

    def _refusal(self, request: Request) -> Response | None:
        if request.method not in CHANGES:
            return None
        if self._dice.random() < self.locked:
            return _fault(409, "Node is locked by host bench, please retry after the current operation is completed.")
        if request.url.path.endswith("/states/provision") and self.pool.in_progress >= self.workers:
            return _fault(503, "Requested action cannot be performed due to lack of free conductor workers.")
        return None

    async def _counts(self, _: Request) -> Response:
        return JSONResponse(dict(self.counts))

    async def _trouble(self, request: Request) -> Response:
        self.workers = int(request.query_params.get("workers", 1_000_000))
        self.locked = float(request.query_params.get("locked", 0.0))
        return JSONResponse({})


def kind_of(path: str) -> str:
    """A path without what names one node."""
    parts = path.strip("/").split("/")
    return "/".join([*parts[:2], *(["{node}", *parts[3:5]] if len(parts) > 2 else [])])


def _fault(status: int, text: str) -> Response:
    return JSONResponse({"error_message": {"faultcode": "Server", "faultstring": text}}, status_code=status)


async def serve(nodes: int, broker: str, port: int) -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    rng = random.Random(1)
    ironic = MeteredIronic(AmqpAnnouncer(broker), clock=SystemClock(), rng=rng, behaviour=BEHAVIOUR, port=port)
    ironic.pool.plan(nodes, classes=("baremetal-gold",))
    await ironic.start()
    await stop.wait()
    await ironic.stop()


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--broker", required=True)
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    asyncio.run(serve(given.nodes, given.broker, given.port))


if __name__ == "__main__":
    main()
