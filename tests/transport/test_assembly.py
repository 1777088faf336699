"""What becomes of the bodies of a message, and of one that is not what was announced when it is looked at."""

from __future__ import annotations

import struct

import pytest
from tests.rows import rows

from trimesh._transport.messages.incoming import Assembly, AssemblyError, one_body

IN_SEGMENT = 1 << 63 | 1 << 40 | 100_000


def take(word: int) -> memoryview:
    assert word == IN_SEGMENT
    return memoryview(b"shared")


def alone(word: int, piece: bytes) -> memoryview:
    return one_body(memoryview(b"before.." + struct.pack("<Q", word)), 8, memoryview(piece), take)


def assembled(word: int, piece: bytes) -> memoryview:
    return Assembly(memoryview(struct.pack("<Q", word)), memoryview(piece), take).finish()[0]


@pytest.mark.parametrize("made_by", [alone, assembled])
@pytest.mark.parametrize(
    ("word", "piece", "contents"), [(0, b"", b""), (5, b"12345", b"12345"), (IN_SEGMENT, b"", b"shared")]
)
def test_one_body_is_the_same_with_and_without_an_assembly(made_by, word: int, piece: bytes, contents: bytes):
    assert made_by(word, piece) == contents


@rows("made_by", [alone, assembled])
@rows(("word", "piece"), [(4, b"12345"), (6, b"12345"), (1, b""), (0, b"1"), (IN_SEGMENT, b"1")])
def test_one_body_of_another_size_than_announced_is_refused(made_by, word: int, piece: bytes):
    """The peer can change the table after the library has looked at it."""
    with pytest.raises(AssemblyError):
        made_by(word, piece)


def test_body_is_the_receivers_own():
    sent = bytearray(b"12345")

    body = one_body(memoryview(struct.pack("<Q", 5)), 0, memoryview(sent), take)
    sent[0] = 0
    body[1] = 0

    assert body == b"1\x00345"
    assert sent == b"\x002345"
