"""Hypothesis under load: a machine with two cores and other work has no deadline per example."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("loaded", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loaded")
