"""Derived from the program for its users: the command line, the manual page, the AsyncAPI document."""
