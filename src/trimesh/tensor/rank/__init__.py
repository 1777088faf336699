"""A rank: its thread, its command stream, its tensors."""
