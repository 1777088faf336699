"""Other processes: the link to one, an actor of one, its calls here, how they ended, what they may send."""
