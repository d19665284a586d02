"""Answers an unmodified Nova in nova-scheduler's place, with scheduler_worker's selection and claims."""

from __future__ import annotations
