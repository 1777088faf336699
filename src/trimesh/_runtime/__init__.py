"""One process: its links, its actors, its children. The only floor that starts tasks and processes."""
