"""Planned faults of a test, chosen by name or at random, and their injection in one process."""
