"""`berth up` and what a trial needs: private servers, and the workers in one process or as processes of their own."""

from __future__ import annotations
