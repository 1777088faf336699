"""Bytes that travel beside a value, and what leaves a pickle in a way of its own. Pure."""
