"""The demonstration of `scripts/demo`, and the recorded runs of a real Ironic that it replays."""
