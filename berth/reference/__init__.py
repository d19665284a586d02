"""The derived pages of docs/reference: `python -m berth.reference` writes them, a test compares them with the code."""
