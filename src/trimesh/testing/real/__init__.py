"""The same faults over real processes."""
