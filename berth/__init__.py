"""The command line, the web server, the client library, and the operators' tools."""
