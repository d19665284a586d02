"""The filters that come with berth, a file for each question, loaded by class path like an operator's own."""
