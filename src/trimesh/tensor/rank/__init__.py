"""One rank: its thread, its stream of commands, its tensors."""
