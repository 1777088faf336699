"""Sessions between hosts without TLS: what has to be said for that, and what is said of it on every start."""

from __future__ import annotations

from typing import Any, Final

UNDERSTOOD: Final = "I understand"
"""What `insecure=` of a job must be."""


def checked_insecure(insecure: Any, pki: object = None) -> str:
    """Return what a job says of plain sessions: "" or `UNDERSTOOD`.

    Raises:
        ValueError: It is another text, or certificates are given, too.
    """
    if insecure not in ("", UNDERSTOOD):
        raise ValueError(
            f"insecure= takes the text {UNDERSTOOD!r} and no other, got {insecure!r}: sessions between hosts are then "
            "without TLS, so whoever is in the network reads all of it and can change it; leave it out for TLS"
        )
    if insecure and pki is not None:
        raise ValueError("a job has certificates (pki=), or does without (insecure=), got both: leave one out")
    return str(insecure)


def plain_warning(whose: str) -> str:
    """Return what is said on every start."""
    return (
        f"sessions between the hosts of {whose} are INSECURE, without TLS: whoever is in the network reads all of it, "
        "and can change it and run code"
    )
