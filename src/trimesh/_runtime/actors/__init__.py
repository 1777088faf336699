"""Actors of this process: messages from elsewhere, mailboxes, endpoints at work, the agent that spawns them."""
