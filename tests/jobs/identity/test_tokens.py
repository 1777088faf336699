"""Join tokens: worth something once, for five minutes, on one session, for one incarnation."""

from __future__ import annotations

import pytest

from trimesh import limits
from trimesh.errors import LimitExceeded
from trimesh.ids import ProcId

pytest.importorskip("cryptography")  # the door of the room needs it

from trimesh.jobs.identity import IdentityError, JoinToken, TokenLedger, proof_of

PIN, EXPORTER, HOST = bytes(range(32)), b"e" * 32, ProcId(7)


@pytest.fixture
def tokens() -> TokenLedger:
    return TokenLedger(PIN)


def redeem(
    tokens: TokenLedger,
    token: JoinToken,
    *,
    proof: bytes | None = None,
    exporter: bytes = EXPORTER,
    incarnation: ProcId = HOST,
    now: float = 1.0,
) -> bool:
    proof = proof_of(token.secret, EXPORTER, token.mesh, HOST) if proof is None else proof
    return tokens.redeem(token.number, proof, exporter=exporter, incarnation=incarnation, now=now)


def test_token_admits_once(tokens: TokenLedger) -> None:
    token = tokens.issue(0.0)

    assert redeem(tokens, token)
    assert not redeem(tokens, token)
    assert len(tokens) == 0


@pytest.mark.parametrize(("now", "is_admitted"), [(limits.JOIN_TOKEN_SECONDS - 0.1, True), (300.0, False)])
def test_token_lasts_five_minutes(tokens: TokenLedger, now: float, is_admitted: bool) -> None:
    assert redeem(tokens, tokens.issue(0.0), now=now) is is_admitted


def test_proof_of_another_session_or_incarnation_is_worth_nothing(tokens: TokenLedger) -> None:
    token = tokens.issue(0.0)

    assert not redeem(tokens, token, exporter=b"f" * 32)
    assert not redeem(tokens, token, incarnation=ProcId(8))
    assert not redeem(tokens, token, proof=b"")
    assert not redeem(tokens, token, proof=proof_of(bytes(32), EXPORTER, token.mesh, HOST))
    assert redeem(tokens, token)  # none of these has used it up


def test_unknown_token_is_not_admitted_by_a_proof_of_zeros(tokens: TokenLedger) -> None:
    unknown = JoinToken(bytes(16), bytes(32), PIN)

    assert not redeem(tokens, unknown)


def test_tokens_that_are_out_are_bounded(tokens: TokenLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOIN_TOKENS_MAX", 2)
    tokens.issue(0.0)
    tokens.issue(1.0)
    with pytest.raises(LimitExceeded, match="too many join tokens"):
        tokens.issue(2.0)

    tokens.issue(limits.JOIN_TOKEN_SECONDS)  # the first is too old by now


def test_token_travels_as_one_line_and_shows_its_secret_nowhere_else(tokens: TokenLedger) -> None:
    token = tokens.issue(0.0)

    assert JoinToken.parse(f" {token.text}\n") == token
    assert token.secret.hex() not in repr(token)
    assert repr(token.secret) not in repr(token)


@pytest.mark.parametrize("text", ["", "trimesh-join-1:", "trimesh-join-2:AAAA", "trimesh-join-1:A", "secret!"])
def test_what_is_no_token_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(IdentityError, match="a join token must be one line") as caught:
        JoinToken.parse(text)

    assert "secret!" not in str(caught.value)


def again(tokens: TokenLedger, token: JoinToken, incarnation: ProcId, *, secret: bytes | None = None) -> bool:
    proof = proof_of(token.secret if secret is None else secret, EXPORTER, token.mesh, incarnation)
    return tokens.is_again(token.number, proof, exporter=EXPORTER, incarnation=incarnation)


def test_spent_token_is_proven_again_by_its_host_until_that_is_forgotten() -> None:
    """A door of a user's own certificates asks for it on both connections (TK-4)."""
    tokens = TokenLedger(PIN, keeps_spent=True)
    token, other = tokens.issue(0.0), tokens.issue(0.0)
    assert not again(tokens, token, HOST)
    assert redeem(tokens, token)
    assert again(tokens, token, HOST)
    assert again(tokens, token, HOST)
    assert not again(tokens, token, HOST, secret=other.secret)
    assert not again(tokens, token, ProcId(8))
    renumbered = JoinToken(other.number, token.secret, PIN)
    assert not again(tokens, renumbered, HOST)
    unknown = JoinToken(token.number, bytes(32), PIN)
    assert not again(tokens, unknown, ProcId(8))
    tokens.forget(ProcId(8))
    assert again(tokens, token, HOST)
    tokens.forget(HOST)
    assert not again(tokens, token, HOST)


def test_spent_token_is_not_kept_where_certificates_are_enough(tokens: TokenLedger) -> None:
    token = tokens.issue(0.0)
    assert redeem(tokens, token)
    assert not again(tokens, token, HOST)


def test_door_knows_why_a_token_was_refused(tokens: TokenLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    used, old, unused = tokens.issue(0.0), tokens.issue(0.0), tokens.issue(limits.JOIN_TOKEN_SECONDS)
    assert (len(tokens), old.number in tokens, unused.number in tokens) == (1, False, True)
    assert tokens.why_refused(old.number).startswith("it is older than limits.JOIN_TOKEN_SECONDS (300 s)")
    assert "its proof is wrong" in tokens.why_refused(unused.number)
    assert redeem(tokens, unused, now=limits.JOIN_TOKEN_SECONDS)
    assert "a host has joined by it" in tokens.why_refused(unused.number)
    assert tokens.why_refused(b"x") == "it is not of this door"
    monkeypatch.setattr(limits, "JOIN_TOKENS_MAX", 3)
    late = tokens.issue(limits.JOIN_TOKEN_SECONDS)
    assert redeem(tokens, late, now=limits.JOIN_TOKEN_SECONDS)
    assert tokens.why_refused(used.number) == "it is not of this door"  # the oldest reason is dropped
    assert tokens.why_refused(old.number).startswith("it is older")
    assert "has joined" in tokens.why_refused(late.number)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_pin_is_a_digest(size: int) -> None:
    with pytest.raises(ValueError, match=f"a pin must have 32 bytes, got {size}"):
        TokenLedger(bytes(size))
