"""What collectives send, by rings."""


def ring_bytes(count: int, ranks: int) -> int:
    """Return the bytes that each of some ranks sends to bring `count` bytes together."""
    return count * (ranks - 1) // ranks
