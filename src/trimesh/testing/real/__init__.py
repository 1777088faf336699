"""Faults and test runs over real processes."""
