"""The instance state machine: plain functions and frozen values. Begin with `instance` (the record), `events` (what can
happen to it), `table` (the rule for each state and event) and `rules` (builds and deletes).
"""

from __future__ import annotations
