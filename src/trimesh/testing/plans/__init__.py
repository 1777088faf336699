"""Faults that a test plans, by name or by chance, and what makes them happen in one process."""
