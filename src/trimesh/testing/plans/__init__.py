"""Faults that a test plans, by name or by chance, and their injection in one process."""
