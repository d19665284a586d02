"""The weighers that come with berth, one a file, loaded by class path like anybody else's."""
