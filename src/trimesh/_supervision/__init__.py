"""Who failed and who must know. Pure policies."""
