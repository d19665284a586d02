"""A backup of everything that lasts: a directory with a manifest and a file for each table of each schema."""
