"""Messages of the packages above, and memory granted to other processes."""
