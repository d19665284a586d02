"""Hostile input at every door, from a seed: see scripts/nightly fuzz."""
