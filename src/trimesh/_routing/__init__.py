"""Who gets what, and when a call is complete. Pure state machines."""
