"""Chaos: real processes on real servers, killed, paused and cut off under load; judged from the outside at the end."""
