"""What the runtime asks of a transport and of a mover."""
