"""Ironic node state to inventory, at once."""
