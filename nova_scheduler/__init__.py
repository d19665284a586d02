"""In front of a real Nova: the topic `scheduler` of an unmodified cloud, answered by berth's own domain."""

from __future__ import annotations
