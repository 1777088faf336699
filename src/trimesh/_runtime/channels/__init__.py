"""Channels: who has a port, what waits at the two ends."""
