"""Tokens by which hosts join: 256 bits, used once, five minutes; PURE, the time is handed in.

TK-1 A token itself never travels on the link: its proof is bound to one TLS session by the exporter, and to mesh and
incarnation. TK-2 A token admits once; a wrong proof does not use it up, so that a stranger who has seen its number
cannot spend it. TK-3 Which of the reasons it was is not told to the peer. TK-4 Where certificates say nothing of
incarnations, the token by which one has joined is asked for again on each of its connections.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from typing import Final

import msgspec

from trimesh import limits
from trimesh.errors import LimitExceeded
from trimesh.ids import ProcId
from trimesh.jobs.identity.authority import IdentityError

_PREFIX: Final = "trimesh-join-1"
_PLAIN_PREFIX: Final = "trimesh-plain-1"
"""Of a token that is for sessions without TLS: so a host cannot be led to do without by anything else."""

_LABEL: Final = b"trimesh join 1\0"
_NUMBER_BYTES: Final = 16
_SECRET_BYTES: Final = 32
_PIN_BYTES: Final = 32


class JoinToken(msgspec.Struct, frozen=True):
    """What a host needs to join. `text` is a secret: stdin, a file of mode 0600, or a Secret; no argument, no variable.

    Attributes:
        number: Which token, 16 bytes; no secret.
        secret: 32 bytes.
        pin: SHA-256 of the public key of the mesh's authority.
        is_plain: Whether sessions of the mesh are plain.
    """

    number: bytes
    secret: bytes
    pin: bytes
    is_plain: bool = False

    def __repr__(self) -> str:
        return f"JoinToken({self.number.hex()}, secret not shown)"

    @property
    def text(self) -> str:
        """The token as one line."""
        prefix = _PLAIN_PREFIX if self.is_plain else _PREFIX
        return f"{prefix}:{base64.urlsafe_b64encode(self.number + self.secret + self.pin).decode()}"

    @property
    def mesh(self) -> bytes:
        """The mesh that it is for, 16 bytes."""
        return self.pin[:16]

    @staticmethod
    def parse(text: str) -> JoinToken:
        """Read `text`. The error shows nothing of it.

        Raises:
            IdentityError: It is no token.
        """
        head, _, rest = text.strip().partition(":")
        try:
            raw = base64.b64decode(rest.encode(), altchars=b"-_", validate=True)
        except ValueError:
            raw = b""
        if head not in (_PREFIX, _PLAIN_PREFIX) or len(raw) != _NUMBER_BYTES + _SECRET_BYTES + _PIN_BYTES:
            raise IdentityError(
                f"a join token is one line that begins with {_PREFIX}:, as the door of the mesh prints it; "
                f"got {len(text)} characters that are none"
            )
        number, secret = raw[:_NUMBER_BYTES], raw[_NUMBER_BYTES : _NUMBER_BYTES + _SECRET_BYTES]
        return JoinToken(number, secret, raw[_NUMBER_BYTES + _SECRET_BYTES :], head == _PLAIN_PREFIX)


def proof_of(secret: bytes, exporter: bytes, mesh: bytes, incarnation: ProcId) -> bytes:
    """Return what shows that a token is known, 32 bytes, worth something on the session of `exporter` only."""
    return hmac.digest(secret, _LABEL + exporter + mesh + incarnation.to_bytes(8, "little"), "sha256")


class _Issued(msgspec.Struct, frozen=True):
    secret: bytes
    until: float

    def __repr__(self) -> str:
        return "_Issued(secret not shown)"


class _Spent(msgspec.Struct, frozen=True):
    number: bytes
    secret: bytes

    def __repr__(self) -> str:
        return "_Spent(secret not shown)"


class TokenLedger:
    """The tokens of one door. Times are of one clock that does not go back."""

    def __init__(self, pin: bytes, *, keeps_spent: bool = False, is_plain: bool = False) -> None:
        """Begin without any.

        Args:
            pin: Of the authority of the mesh.
            keeps_spent: Whether who has joined shows its token again (TK-4).
            is_plain: Whether sessions of the mesh are plain.
        """
        if len(pin) != _PIN_BYTES:
            raise ValueError(f"a pin has {_PIN_BYTES} bytes, got {len(pin)}")
        self._pin = pin
        self._issued: dict[bytes, _Issued] = {}
        self._over: dict[bytes, str] = {}
        self._keeps_spent = keeps_spent
        self._is_plain = is_plain
        self._spent: dict[ProcId, _Spent] = {}

    def __len__(self) -> int:
        """Count the tokens that have been issued, not used, and not dropped for their age."""
        return len(self._issued)

    def __contains__(self, number: bytes) -> bool:
        """Tell whether a token of this number is out, as far as was looked at."""
        return number in self._issued

    def issue(self, now: float) -> JoinToken:
        """Return a new token, worth something for `limits.JOIN_TOKEN_SECONDS`.

        Raises:
            LimitExceeded: `limits.JOIN_TOKENS_MAX` are out.
        """
        self._forget_old(now)
        if len(self._issued) >= limits.JOIN_TOKENS_MAX:
            raise LimitExceeded(
                "JOIN_TOKENS_MAX", limits.JOIN_TOKENS_MAX, "too many join tokens have not been used yet"
            )
        token = JoinToken(
            secrets.token_bytes(_NUMBER_BYTES), secrets.token_bytes(_SECRET_BYTES), self._pin, self._is_plain
        )
        self._issued[token.number] = _Issued(token.secret, now + limits.JOIN_TOKEN_SECONDS)
        return token

    def redeem(self, number: bytes, proof: bytes, *, exporter: bytes, incarnation: ProcId, now: float) -> bool:
        """Use a token up, if it is one that has not been used, is not too old, and is proven.

        Args:
            number: Which token the peer has named.
            proof: What the peer has sent.
            exporter: Of the session on which it came, taken here.
            incarnation: Of the peer, as its hello says.
            now: The time.
        """
        self._forget_old(now)
        issued = self._issued.get(number)
        secret = issued.secret if issued is not None else bytes(_SECRET_BYTES)  # so that a wrong number takes as long
        expected = proof_of(secret, exporter, self._pin[:16], incarnation)
        is_proven = hmac.compare_digest(expected, proof)
        if issued is None or not is_proven:
            return False
        del self._issued[number]
        self._remember(number, "a host has joined by it already, and a token admits one")
        if self._keeps_spent:
            self._spent[incarnation] = _Spent(number, issued.secret)
        return True

    def is_again(self, number: bytes, proof: bytes, *, exporter: bytes, incarnation: ProcId) -> bool:
        """Tell whether a peer knows the token by which its incarnation has joined (TK-4)."""
        spent = self._spent.get(incarnation)
        secret = spent.secret if spent is not None else bytes(_SECRET_BYTES)
        is_proven = hmac.compare_digest(proof_of(secret, exporter, self._pin[:16], incarnation), proof)
        return spent is not None and spent.number == number and is_proven

    def forget(self, incarnation: ProcId) -> None:
        """Let an incarnation show its token no more."""
        self._spent.pop(incarnation, None)

    def why_refused(self, number: bytes) -> str:
        """Return in words why a token was not taken just now: for this side, the peer is not told (TK-3)."""
        if number in self._issued:
            return "its proof is wrong: who shows it knows its number only"
        return self._over.get(number, "it is not of this door")

    def _forget_old(self, now: float) -> None:
        old = [number for number, one in self._issued.items() if now >= one.until]
        for number in old:
            del self._issued[number]
            self._remember(number, f"it is older than limits.JOIN_TOKEN_SECONDS ({limits.JOIN_TOKEN_SECONDS:g} s)")

    def _remember(self, number: bytes, text: str) -> None:
        if len(self._over) >= limits.JOIN_TOKENS_MAX:
            del self._over[next(iter(self._over))]
        self._over[number] = text
