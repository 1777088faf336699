"""Lines of JSON between two processes whose user has brought a token from the one to the other.

Each line is signed with the token, so that neither side takes anything from a process that was not told it. Nothing is
kept secret from those who listen.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any, Final

import msgspec
import trio

from trimesh import limits
from trimesh.errors import ProtocolError

ASKING: Final = "asking"
ASKED: Final = "asked"
_SIGN_CHARS: Final = 64


class SignedLines:
    """One side of a connection.

    Args:
        stream: The connection.
        token: What both sides know.
        side: Which of both this is, `ASKING` or `ASKED`: what one has said means nothing as the word of the other.
    """

    def __init__(self, stream: trio.SocketStream, token: str, side: str) -> None:
        self._stream = stream
        self._token = token.encode()
        self._side = side
        self._other = ASKED if side == ASKING else ASKING
        self._sent = 0
        self._taken = 0
        self._rest = bytearray()

    def _sign(self, side: str, number: int, text: bytes) -> bytes:
        head = f"{side} {number} ".encode()
        return hmac.new(self._token, head + text, hashlib.sha256).hexdigest().encode()

    async def send(self, value: Any) -> None:
        """Send a value of plain types. Raises `trio.BrokenResourceError`; a checkpoint, cancellable."""
        text = msgspec.json.encode(value)
        await self._stream.send_all(self._sign(self._side, self._sent, text) + text + b"\n")
        self._sent += 1

    async def take(self) -> Any:
        """Return the next value from the other side.

        Raises:
            ProtocolError: What came was not signed with the token, is too long, or no JSON.
            trio.EndOfChannel: The connection has ended.

        Blocking: a checkpoint, cancellable.
        """
        while b"\n" not in self._rest:
            if len(self._rest) > limits.SIGNED_LINE_BYTES_MAX:
                raise ProtocolError(f"a line must have at most {limits.SIGNED_LINE_BYTES_MAX} bytes")
            data = await self._stream.receive_some(limits.SIGNED_LINE_BYTES_MAX)
            if not data:
                raise trio.EndOfChannel
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        sign, text = bytes(line[:_SIGN_CHARS]), bytes(line[_SIGN_CHARS:])
        if not hmac.compare_digest(sign, self._sign(self._other, self._taken, text)):
            raise ProtocolError("a line must be signed with the token that the other side has printed")
        self._taken += 1
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"a line must be JSON: {error}") from error
