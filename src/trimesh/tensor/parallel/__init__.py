"""Parallel plans: placements of a module's parameters, by patterns of their names; schedules of pipelines."""
