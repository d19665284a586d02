"""The filters that come with berth, one a file, loaded by class path like an operator's own."""
