"""Supervision: restart policies, verdicts on failures, rosters. Pure."""
