"""The verbs that wait for results, as objects; calls that are awaited later."""
