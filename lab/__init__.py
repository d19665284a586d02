"""The laboratory: it proves and measures berth; no site installs it."""
