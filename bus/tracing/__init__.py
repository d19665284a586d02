"""Distributed traces: W3C trace contexts on messages, spans around what workers do, exported by OTLP."""
