"""Derived from the program for its users: the command line, the AsyncAPI document."""
