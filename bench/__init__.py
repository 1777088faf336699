"""Benchmarks beside the peer; `run.py` is the way in."""
