"""Whether certificate files of a site can be what they are to be, on this host and now; for `trimesh doctor`."""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from trimesh.jobs.identity.credentials import Credentials, IdentityError

if TYPE_CHECKING:
    from cryptography import x509

_FORM: Final = "%Y-%m-%d %H:%M %Z"


def look_at(credentials: Credentials, now: datetime) -> datetime:
    """Check certificates, key and authority, as far as one host can; no peer is asked.

    Args:
        credentials: As `read_own_pki` returns them.
        now: The time, of any zone.

    Returns:
        When the first certificate that is needed expires.

    Raises:
        IdentityError: Something is not what it must be; the text names it.
    """
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - as in `authority`, when it is needed
    from cryptography.hazmat.primitives import serialization  # noqa: PLC0415

    chain = _certificates(credentials.chain, "certificate")
    authorities = _certificates(credentials.authority, "authority")
    try:
        key = serialization.load_pem_private_key(credentials.key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise IdentityError(f"the key needs to be a private key in PEM without a password: {error}") from None
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) != chain[0].public_key().public_bytes(*form):
        raise IdentityError("the key needs to be that of the first certificate of the file, and is another one")
    _check_names(chain[0])
    needed = [*chain, _issuer_of(chain, authorities)]
    for one in needed:
        _check_dates(one, now)
    return min(one.not_valid_after_utc for one in needed)


def _certificates(text: bytes, what: str) -> list[x509.Certificate]:
    from cryptography import x509  # noqa: PLC0415

    try:
        return x509.load_pem_x509_certificates(text)
    except ValueError as error:
        raise IdentityError(f"the {what} needs to be a file of certificates in PEM: {error}") from None


def _issuer_of(chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> x509.Certificate:
    """Return who of the authorities has certified the last one, and check that each certifies the one before."""
    for one, issuer in pairwise(chain):
        if not _has_issued(issuer, one):
            raise IdentityError(
                f"each certificate of the file needs to be signed by the next one, and {_name(issuer)} has not signed "
                f"that of {_name(one)}"
            )
    for authority in authorities:
        if authority == chain[-1] or _has_issued(authority, chain[-1]):
            return authority
    raise IdentityError(
        f"the last certificate of the file, of {_name(chain[-1])}, needs to be signed by the authority, "
        f"{', '.join(map(_name, authorities))}, and is not: it was issued by {chain[-1].issuer.rfc4514_string()!r}"
    )


def _has_issued(issuer: x509.Certificate, one: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415

    try:
        one.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_names(one: x509.Certificate) -> None:
    from cryptography import x509  # noqa: PLC0415

    try:
        names = one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        names = None
    kinds = (x509.UniformResourceIdentifier, x509.DNSName)
    if names is None or not any(names.get_values_for_type(kind) for kind in kinds):
        raise IdentityError("the certificate needs to name its host by a URI or a name of DNS, and names none")


def _check_dates(one: x509.Certificate, now: datetime) -> None:
    begins, ends = one.not_valid_before_utc, one.not_valid_after_utc
    if now < begins:
        raise IdentityError(f"the certificate of {_name(one)} is not valid before {begins:{_FORM}}")
    if now > ends:
        raise IdentityError(f"the certificate of {_name(one)} has expired, at {ends:{_FORM}}")


def _name(one: x509.Certificate) -> str:
    return repr(one.subject.rfc4514_string() or f"serial number {one.serial_number:x}")
