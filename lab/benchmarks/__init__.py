"""Instruments that measure; run by hand or by name, never as timed tests."""
