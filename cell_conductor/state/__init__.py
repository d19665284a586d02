"""The record of an instance, its events, the desired state of each phase, and what a record proves. Pure: frozen values
and plain functions. Begin with `instance`, `events` and `desired_state`.
"""

from __future__ import annotations
