"""Threads that a debugger holds: who they are, who waits for them, which terminal has them."""
