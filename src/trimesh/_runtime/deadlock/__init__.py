"""Who waits for whom, and which call of a deadlock is to fail."""
