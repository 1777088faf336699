"""Other processes: the link to one, an actor of one, how they ended, what they may send."""
