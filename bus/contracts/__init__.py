"""What is said on the bus. Imports nothing of ours."""
