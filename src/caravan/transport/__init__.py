"""Byte pipes under the wire: TCP, Unix sockets, and an in-memory pair for tests and docs."""
