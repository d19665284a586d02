"""`berth up` and what a trial needs: private servers, workers as processes, an Ironic that is simulated."""

from __future__ import annotations
