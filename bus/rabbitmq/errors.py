"""Translates the broker's errors to the errors of the port."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from aiormq import exceptions
from aiormq.exceptions import AMQPConnectionError, AMQPError, ChannelClosed, ChannelInvalidStateError

from bus.transport import (
    BusError,
    BusForbidden,
    BusRightsMissing,
    BusUnavailable,
    PublishRefused,
    QueueDiffers,
    QueueLocked,
    QueueMissing,
    Unroutable,
)

# Connection.Close with this code: the virtual host is not there, or these credentials may not enter it.
NOT_ALLOWED = 530

# How aiormq reports that the other side closed the connection in the middle: of a frame, or before the first one.
BROKEN_OFF = (EOFError, StopAsyncIteration)
# What a channel or connection that is of no use any more raises. aiormq ends some futures twice, which is asyncio's own
# error: it is raised by what uses a channel that was closed before its connection was.
_UNUSABLE = (ChannelInvalidStateError, asyncio.InvalidStateError, OSError, TimeoutError, RuntimeError)


# By why the broker closed a channel.
_CLOSED: dict[type[ChannelClosed], type[BusError]] = {
    exceptions.ChannelAccessRefused: BusRightsMissing,
    exceptions.ChannelNotFoundEntity: QueueMissing,
    exceptions.ChannelLockedResource: QueueLocked,
    exceptions.ChannelPreconditionFailed: QueueDiffers,
}


class BrokerUntrusted(BusForbidden):
    """The certificate of the broker is not of a CA that we know, or not for the name that we called it by."""

    code = "bus.certificate"


@contextmanager
def translated(about: str = "") -> Iterator[None]:
    """Raise what aiormq raises as the port's errors. `about`: the name of the exchange or queue meant."""
    try:
        yield
    except asyncio.CancelledError:
        # aiormq ends what waits on a closed connection with CancelledError; only a real cancellation may pass.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise BusUnavailable("the connection was closed") from None
    except (AMQPError, *_UNUSABLE, *BROKEN_OFF) as error:
        raise port_error(error, about) from error
    except Exception as error:  # re-raised but for one
        # aiormq ends what waits on a closed connection with a bare Exception when it knows no reason. An error of
        # another type is a defect of berth and is raised unchanged.
        if type(error) is Exception:
            raise BusUnavailable("the connection was closed") from error
        raise


def port_error(error: BaseException, about: str = "") -> BusError:
    """The port's error for one of aiormq's."""
    if isinstance(error.__cause__, ssl.SSLCertVerificationError):
        return BrokerUntrusted(f"its certificate is refused: {error.__cause__.verify_message}")
    text = _text(error)
    if isinstance(error, exceptions.PublishError):
        return Unroutable(text)
    if isinstance(error, exceptions.DeliveryError):
        return PublishRefused(f"{about}: refused")
    if isinstance(error, exceptions.ConnectionNotAllowed) or (
        isinstance(error, exceptions.ConnectionClosed) and error.args and error.args[0] == NOT_ALLOWED
    ):
        return BusRightsMissing(text)
    if isinstance(error, exceptions.ProbableAuthenticationError):
        return BusForbidden(text)
    if isinstance(error, ChannelClosed):
        # The text is the broker's own and names the thing meant, the only way to distinguish them; for other users of
        # that channel the bus was unavailable.
        if about and f"'{about}'" not in text:
            return BusUnavailable(text)
        return next((fault for kind, fault in _CLOSED.items() if isinstance(error, kind)), BusError)(text)
    if isinstance(error, (AMQPConnectionError, *_UNUSABLE)):
        return BusUnavailable(text)
    if isinstance(error, BROKEN_OFF):
        return BusUnavailable(f"the other side hung up: {text}")
    return BusError(text)


def _text(error: BaseException) -> str:
    return ": ".join(str(part) for part in error.args if part) or type(error).__name__
