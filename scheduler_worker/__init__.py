"""The scheduler's decisions, as plain functions and frozen values: no I/O, no clock, no randomness."""

from __future__ import annotations
