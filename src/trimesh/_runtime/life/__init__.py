"""One process from its start to its end: its tables, its family, its host."""
