"""Bytes and messages: control structs, payloads, exceptions. Pure: no I/O, no clock."""
