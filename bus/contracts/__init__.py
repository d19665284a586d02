"""The messages of the bus. Imports nothing of ours."""
