"""The derived pages of docs/reference: `python -m lab.reference` writes them, a test compares them."""
