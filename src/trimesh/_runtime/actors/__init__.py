"""Actors of this process: mailboxes, endpoints at work, the agent that spawns them, what is said of their failures."""
