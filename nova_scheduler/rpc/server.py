"""The RPC server of topic `scheduler`, in the place of Nova's own scheduler: what oslo.messaging's rabbit driver does.
Any number of these and of stock nova-schedulers take from the topic's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Collection, Sequence

import structlog

from bus.clock import Clock
from bus.faults import BrokenInvariant, Fault
from bus.rabbitmq.channels import RabbitDelivery
from bus.rabbitmq.transport import RabbitSubscription, RabbitTransport
from bus.transport import BusError, BusUnavailable
from nova_scheduler.decide.decision_log import CallRecorder, not_decided
from nova_scheduler.metrics import CALL_S, CALLS, IN_FLIGHT
from nova_scheduler.request.request_spec import NotDecided
from nova_scheduler.rpc.casts import CastQueue
from nova_scheduler.rpc.deliveries import DeliveredCall, parse_delivery
from nova_scheduler.rpc.dispatcher import CallDispatcher, RetryingDispatcher
from nova_scheduler.rpc.intake import TopicIntake, unblocked
from nova_scheduler.rpc.replies import ReplySender, remember
from nova_scheduler.stock.forwarder import Fallback, ForwardFailed, count_forwarded
from nova_scheduler.wire.envelope import (
    CALL_LIMIT_S,
    Call,
    RemoteFault,
    encode_failure,
    encode_result,
    no_valid_host,
)
from nova_scheduler.wire.methods import check_method, label_of, result_of_base
from nova_scheduler.wire.queues import FRONTENDS, TOPIC, RabbitOptions, fanout_queue, frontends_queue, topic_queue

log = structlog.get_logger("nova")

PREFETCH = 32  # calls in flight of one queue; others are left for other schedulers
CASTS = 64
LAST_REPLIES = 0.1  # the part of the time to stop in which the clients of calls at the fallback are told


class RpcServer:
    """One server of the topic."""

    # A call taken from the topic is put into a queue of the frontends (`TopicIntake`), and carried out when it comes
    # from there. It is acknowledged once its reply is confirmed, so one whose server is killed is delivered again, to
    # any frontend, with the same `unique_id`. A stock nova-scheduler must not get it again: it takes what the first
    # delivery has claimed for a server that moves, and claims a second host. So a call is forwarded to one only when
    # the broker has confirmed that it is acknowledged.

    def __init__(
        self,
        transport: RabbitTransport,  # of Nova's virtual host; it is opened and closed here
        dispatcher: CallDispatcher,
        *,
        host: str,  # this server's name (`scheduler.HOST`)
        unique: str,  # what tells the fanout queue from those of other processes
        options: RabbitOptions,
        control_exchange: str,
        clock: Clock,
        rng: random.Random,
        fallback: Fallback | None = None,  # None: what berth does not decide fails
        recorder: CallRecorder | None = None,
        prefetch: int = PREFETCH,  # calls in flight of one queue
    ) -> None:
        self._transport = transport
        self._dispatcher = RetryingDispatcher(dispatcher, clock, rng)
        self._casts = CastQueue(self._dispatcher, fallback)
        self._replies = ReplySender(transport, clock, rng)
        self._options = options
        self._clock = clock
        self._fallback = fallback
        self._recorder = recorder or CallRecorder()
        self._prefetch = prefetch
        self._topics = [topic_queue(options, control_exchange, key) for key in (TOPIC, f"{TOPIC}.{host}")]
        self._frontends = frontends_queue(options, control_exchange)
        self._fanout = fanout_queue(options, TOPIC, unique)
        # A call is handed over once to each connection: tasks beyond the slots are those of lost connections.
        self._slots = asyncio.Semaphore(prefetch)
        self._calls: dict[str, DeliveredCall] = {}  # by unique id
        self._tasks: dict[asyncio.Task[None], DeliveredCall] = {}
        self._intake = TopicIntake(
            transport,
            FRONTENDS,
            clock=clock,
            refused=lambda call: self._carry(call, ()),
            changed=self._open_intakes,
        )
        self._answered: dict[str, None] = {}
        self._subscriptions: list[RabbitSubscription] = []  # of the casts, and of the frontends
        self._intakes: list[RabbitSubscription] = []  # of the topic
        self._is_full = False
        self._broken: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Connect, and declare exchanges and queues; waits for the broker. Raises BusForbidden."""
        await self._transport.open()
        for queue in (*self._topics, self._frontends, self._fanout):
            await self._transport.declare_external(queue)
        if self._fallback is not None:
            await self._fallback.open()

    async def start(self) -> None:
        """Take calls from now on, and casts."""
        self._broken = asyncio.get_running_loop().create_future()
        stream = self._casts.stream_offset if self._options.rabbit_stream_fanout else dict
        consume = self._transport.consume_external
        self._subscriptions = [
            await consume(self._fanout.name, self._casts.add_fanout, prefetch=CASTS, arguments=stream),
            await consume(FRONTENDS, self._on_delivery, prefetch=self._prefetch),
        ]
        for queue in self._topics:
            self._intakes.append(await consume(queue.name, self._enter, prefetch=self._prefetch))

    async def run(self) -> None:
        """Take calls over, and carry out casts. Raises BrokenInvariant, which the process ends with."""
        assert self._broken is not None, "started"
        loops = [
            asyncio.create_task(self._intake.run(), name="nova entrance"),
            asyncio.create_task(self._casts.run(), name="nova casts"),
        ]
        try:
            done, _ = await asyncio.wait({*loops, self._broken}, return_when=asyncio.FIRST_COMPLETED)
            await next(iter(done))
        finally:
            for one in loops:
                one.cancel()
            await asyncio.gather(*loops, return_exceptions=True)

    async def drain(self, grace_s: float) -> None:
        """Take no more calls, and wait (seconds) until those in hand are answered. What then is not decided goes back
        to the queue of the frontends; the clients of what is at the fallback are told that it failed.
        """
        with contextlib.suppress(TimeoutError, BusError):
            async with asyncio.timeout(grace_s * (1 - LAST_REPLIES)):
                for subscription in self._intakes:
                    await subscription.cancel()
                await self._intake.end()
                for subscription in self._subscriptions:
                    await subscription.cancel()
                while await self._has_more():
                    await asyncio.wait(self._tasks)
        undecided = {
            task: delivered
            for task, delivered in self._tasks.items()
            if delivered.deliveries and not delivered.acknowledged
        }
        await self._cancel(undecided)
        for delivered in undecided.values():
            delivered.requeue()
        if self._fallback is not None:
            self._fallback.abandon()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s * LAST_REPLIES)

    async def _has_more(self) -> bool:
        """Whether calls are in flight. Of the last frontend nobody else would take what has come over."""
        while not self._tasks and not await self._transport.consumers(FRONTENDS):
            delivery = await self._transport.get(FRONTENDS)
            if delivery is None:
                break
            self._on_delivery(delivery)
        return bool(self._tasks)

    async def _cancel(self, tasks: Collection[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close. Calls in hand go back to the queue. The queue of the casts stays until it expires: with the last one
        RabbitMQ deletes the exchange, and the next cast of each nova-compute, within a build for one, fails by a 404.
        """
        for subscription in (*self._intakes, *self._subscriptions):
            await subscription.cancel()
        self._intake.requeue()
        await self._cancel(self._tasks.keys())
        if self._fallback is not None:
            await self._fallback.close()
        await self._transport.close()

    @property
    def in_flight(self) -> int:
        """Calls that are not answered yet."""
        return len(self._tasks)

    @property
    def unavailable_reason(self) -> str:
        """Why no calls can be answered now; "": they can."""
        return self._transport.blocked if self._transport.connected else "not connected"

    # --- what is delivered

    def _enter(self, delivery: RabbitDelivery) -> None:
        call = self._call_of(delivery)
        if call is not None:
            self._intake.add(delivery, call)
            self._open_intakes()

    def _open_intakes(self) -> None:
        """Calls beyond the slots are left in the topic, for other schedulers. Those that wait for the fallback have
        none: they are acknowledged, and the fallback bounds them.
        """
        if self._options.amqp_auto_delete:  # without a consumer the queue would be deleted, with the calls in it
            return
        in_slots = sum(not delivered.acknowledged for delivered in self._tasks.values())
        is_full = in_slots + len(self._intake) >= self._prefetch
        if is_full is not self._is_full:
            self._is_full = is_full
            for subscription in self._intakes:
                (subscription.pause if is_full else subscription.resume)()

    def _on_delivery(self, delivery: RabbitDelivery) -> None:
        call = self._call_of(delivery)
        if call is not None:
            self._carry(call, (delivery,))

    def _carry(self, call: Call, deliveries: Sequence[RabbitDelivery]) -> None:
        delivered = self._calls.get(call.unique_id)
        if delivered is not None:
            delivered.join(deliveries)
        elif call.unique_id in self._answered:
            CALLS.labels(label_of(call), "repeated").inc()
            DeliveredCall(call, deliveries).acknowledge()
        else:
            self._start(DeliveredCall(call, deliveries))

    def _call_of(self, delivery: RabbitDelivery) -> Call | None:
        """The call that is to be answered. A cast is put to the others."""
        call = parse_delivery(delivery, fanout=False)
        if call is not None and call.unread:
            log.warning(call.unread, queue=delivery.routing_key)
            self._carry(call, (delivery,))  # to its answer
            return None
        if call is None or call.is_answered:
            return call
        self._casts.add(call, delivery)
        return None

    # --- calls

    def _start(self, delivered: DeliveredCall) -> None:
        if delivered.call.unique_id:
            self._calls[delivered.call.unique_id] = delivered
        task = asyncio.create_task(self._carry_out(delivered), name=f"nova {delivered.call.method}")
        self._tasks[task] = delivered
        IN_FLIGHT.inc()
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        delivered = self._tasks.pop(task)
        self._open_intakes()
        self._forget(delivered)
        IN_FLIGHT.dec()
        error = None if task.cancelled() else task.exception()
        if error is not None and self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    def _forget(self, delivered: DeliveredCall) -> None:
        """It has ended here: delivered again, it begins anew."""
        if self._calls.get(delivered.call.unique_id) is delivered:
            del self._calls[delivered.call.unique_id]

    async def _carry_out(self, delivered: DeliveredCall) -> None:
        call, begun_s = delivered.call, self._clock.monotonic()
        heartbeats = asyncio.create_task(self._replies.send_heartbeats(call), name="nova heartbeats")
        try:
            async with asyncio.timeout(min(call.limit_s or CALL_LIMIT_S, CALL_LIMIT_S)):
                outcome, body = await self._answer(delivered)
        except TimeoutError:
            outcome, body = "timeout", b""
            log.warning("nova.call_timeout", method=call.method, request_id=call.request_id)
        finally:
            heartbeats.cancel()
            await asyncio.gather(heartbeats, return_exceptions=True)
        if body is None:
            self._forget(delivered)  # before it comes again
            delivered.requeue()
        else:
            if body and not await self._replies.send(call, body):
                outcome = "undeliverable"
            remember(self._answered, call.unique_id)
            delivered.acknowledge()
        CALLS.labels(label_of(call), outcome).inc()
        CALL_S.observe(self._clock.monotonic() - begun_s)

    async def _answer(self, delivered: DeliveredCall) -> tuple[str, bytes | None]:
        """The outcome of a call, and the body of its reply; None: it has none here, and is delivered again. Raises
        BrokenInvariant.
        """
        call = delivered.call
        ids = (call.message_id, self._replies.new_id())
        try:
            if (basic := result_of_base(call)) is not None:
                return "answered", encode_result(*ids, basic[0])
            check_method(call)
            async with self._slots:
                result = await self._dispatcher.call(call)
            return "answered", encode_result(*ids, result)
        except RemoteFault as fault:
            return f"raised {fault.class_name}", encode_failure(*ids, fault)
        except NotDecided as undecided:
            self._recorder.record_decision(not_decided(call, undecided))
            return await self._forwarded(delivered, undecided.reason, ids)
        except BrokenInvariant:
            raise
        except Fault as error:
            log.error("nova.call_failed", code=error.code, reason=str(error), request_id=call.request_id)
            code = error.code
        except Exception:  # of one call, whose client has to learn that it failed
            log.exception("nova.call_failed", method=call.method, request_id=call.request_id)
            code = "internal error"
        # Another exception than NoValidHost has Nova set a running server that was to be moved to ERROR.
        return "failed", encode_failure(*ids, no_valid_host(f"The scheduler could not decide: {code}."))

    async def _forwarded(self, delivered: DeliveredCall, reason: str, ids: tuple[str, str]) -> tuple[str, bytes | None]:
        if self._fallback is None:
            count_forwarded(reason, "no_fallback")
            return "undecided", encode_failure(
                *ids, no_valid_host(f"The scheduler does not decide this request ({reason}), and has no fallback.")
            )

        async def acknowledge_first() -> None:
            try:
                async with asyncio.timeout(delivered.call.answer_timeout_s):
                    await unblocked(self._transport, self._clock)
            except TimeoutError as error:  # its client has given up, perhaps
                if delivered.deliveries:  # delivered again, Nova is asked
                    raise BusUnavailable(self._transport.blocked) from error
                raise ForwardFailed(self._transport.blocked) from error
            await delivered.acknowledge_first()
            self._open_intakes()

        try:
            return "forwarded", await self._fallback.call(delivered.call, reason, acknowledge_first)
        except ForwardFailed as error:
            text = f"The request was left to the fallback's nova-scheduler, which did not answer: {error}."
            return "forward failed", encode_failure(*ids, no_valid_host(text))
        except BusError as error:  # it has not left: another frontend may get it, and forwards it then
            log.warning("nova.call_uncertain", code=error.code, reason=str(error), request_id=delivered.call.request_id)
            return "given back", None
