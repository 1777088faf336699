"""Memory that other processes read and write themselves, in parts and in batches."""
