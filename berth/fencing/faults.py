"""Why a host is not fenced."""

from __future__ import annotations

from bus.faults import Fault


class FencingFailed(Fault):
    """The host could not be switched off, or it is not certain that it is off. It must not be fenced."""

    code = "fencing.failed"
