"""Identities of hosts: certificate authority of a mesh, credentials of an incarnation, join tokens.

`cryptography` (extra `hosts`) makes the certificates. The state machines read no clock: the caller passes the time.

AU-1 Claims in a request are ignored: only its key is used, once the request proves possession of the private half; all
     else comes from the caller.
AU-2 An incarnation is certified once: another key never gets its name.
AU-3 Only the authority signs: a certified host cannot certify others.

TK-1 A token itself is never sent: its proof is bound to one TLS session by the exporter, and to mesh and incarnation.
TK-2 A token admits once; a wrong proof does not use it up, so a stranger that has seen its number cannot spend it.
TK-3 The peer does not learn the reason of a refusal.
TK-4 If certificates do not name incarnations, each connection of a host must prove again the token by which it joined.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import stat
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from trimesh import limits
from trimesh.errors import LimitExceeded, TrimeshError
from trimesh.ids import ID_MAX, ProcId

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes


# ---- the certificate authority of one mesh: made by the outermost block, its key in memory only ----------------------


class IdentityError(TrimeshError):
    """A certificate, key or token is invalid or missing."""


class Credentials(msgspec.Struct, frozen=True):
    """Certificate, key and authority of one incarnation. Its repr shows no key.

    Attributes:
        chain: The own certificate, then those up to the authority, in PEM.
        key: The private key in PEM, without a password.
        authority: The authority that certifies the peers, in PEM.
        peers: Accepted names in the certificates of peers; () accepts the names of the mesh, which sessions check.
        is_plain: True if there are no certificates and nothing is encrypted, by `insecure=` of a job.
    """

    chain: bytes
    key: bytes
    authority: bytes
    peers: tuple[str, ...] = ()
    is_plain: bool = False

    def __repr__(self) -> str:
        return f"Credentials({len(self.chain)} bytes of certificates, key not shown, peers={self.peers})"

    @property
    def has_names(self) -> bool:
        """True if certificates contain names of the mesh."""
        return not self.peers and not self.is_plain

    def accepts(self, name: str | None) -> bool:
        """Return whether a peer may have this name; None stands for a peer without a certificate."""
        return self.has_names or self.is_plain or name in self.peers


PLAIN: Final = Credentials(b"", b"", b"", is_plain=True)
"""Credentials of a process whose sessions are plain."""


def name_of(mesh: bytes, incarnation: ProcId) -> str:
    """Return the name of an incarnation in certificates."""
    if len(mesh) != 16 or not 1 <= incarnation <= ID_MAX:
        raise ValueError(f"a name needs a mesh of 16 bytes and an incarnation from 1 on, got {mesh!r}, {incarnation}")
    return f"trimesh://{mesh.hex()}/{incarnation:016x}"


try:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as error:  # pragma: no cover - the tests have it
    raise IdentityError(
        "meshes over several hosts need the package cryptography: pip install 'trimesh-actors[hosts]'"
    ) from error

_PEM: Final = serialization.Encoding.PEM


class Authority:
    """Certifies the incarnations of one mesh.

    Attributes:
        certificate: Its own certificate in PEM.
        pin: SHA-256 of its public key (SubjectPublicKeyInfo), by which joining hosts recognise it.
        mesh: The first 16 bytes of `pin`: id of the mesh in names and hellos.
    """

    certificate: bytes
    pin: bytes
    mesh: bytes

    def __init__(self, now: float) -> None:
        """Make an authority; its key exists in this object only. Takes 1 ms.

        Args:
            now: Unix time, from which the authority is valid.
        """
        self._key = _new_key()
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "trimesh mesh authority")])
        public = self._key.public_key()
        usage = _usage(certifies=True)
        builder = _builder(self._name, self._name, public, now, limits.AUTHORITY_VALID_SECONDS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        self.certificate = builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM)
        self.pin = pin_of(public)
        self.mesh = self.pin[:16]
        self._certified: set[ProcId] = set()

    def __repr__(self) -> str:
        return f"Authority(mesh={self.mesh.hex()}, {len(self._certified)} certified)"

    def credentials(self, incarnation: ProcId, now: float) -> Credentials:
        """Certify an incarnation of this process, and return its credentials."""
        key = _new_key()
        chain = self._certify(incarnation, key.public_key(), now)
        return Credentials(chain=chain, key=_text_of(key), authority=self.certificate)

    def certify(self, request: bytes, incarnation: ProcId, now: float) -> bytes:
        """Return the certificate chain, in PEM, for the key in a request of another process.

        Args:
            request: PKCS #10 in PEM, at most `limits.KEY_REQUEST_BYTES_MAX`.
            incarnation: Its future owner, from the hello of the admitted peer.
            now: Unix time.

        Raises:
            IdentityError: It is no request, is not signed by its own key, or the incarnation is certified already.
            LimitExceeded: `limits.CERTIFIED_MAX` incarnations are certified.
        """
        if len(request) > limits.KEY_REQUEST_BYTES_MAX:
            raise IdentityError(
                f"a request for a certificate must have at most limits.KEY_REQUEST_BYTES_MAX "
                f"({limits.KEY_REQUEST_BYTES_MAX}) bytes, got {len(request)}"
            )
        try:
            asked = x509.load_pem_x509_csr(request)
            public = asked.public_key()
            is_proven = asked.is_signature_valid
        except Exception as error:  # ASN.1 errors have many classes
            raise IdentityError(f"a request for a certificate needs to be PKCS #10 in PEM: {error}") from error
        if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
            raise IdentityError(f"a request for a certificate needs a key on P-256, got {type(public).__name__}")
        if not is_proven:
            raise IdentityError("a request for a certificate needs to be signed by its own key; its signature is wrong")
        return self._certify(incarnation, public, now)

    def _certify(self, incarnation: ProcId, public: ec.EllipticCurvePublicKey, now: float) -> bytes:
        name = name_of(self.mesh, incarnation)
        if incarnation in self._certified:
            raise IdentityError(f"an incarnation gets one certificate, and {incarnation:016x} has one (AU-2)")
        if len(self._certified) >= limits.CERTIFIED_MAX:
            raise LimitExceeded("CERTIFIED_MAX", limits.CERTIFIED_MAX, "too many hosts have joined this mesh")
        builder = _builder(x509.Name([]), self._name, public, now, limits.CERTIFICATE_VALID_SECONDS)
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name)])
        builder = builder.add_extension(names, critical=True)  # the subject is empty
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(certifies=False), critical=True)
        purposes = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(purposes, critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        signed = builder.sign(self._key, hashes.SHA256())
        self._certified.add(incarnation)
        chain: bytes = signed.public_bytes(_PEM) + self.certificate
        return chain


class KeyRequest:
    """The key of a joining host, which never leaves the host, and the request for its certificate.

    Attributes:
        text: PKCS #10 in PEM, for `Authority.certify`.
    """

    text: bytes

    def __init__(self) -> None:
        self._key = _new_key()
        request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        self.text = request.sign(self._key, hashes.SHA256()).public_bytes(_PEM)

    def credentials(self, chain: bytes, pin: bytes, now: float | None = None) -> Credentials:
        """Return the credentials, with the chain that the authority has sent.

        Args:
            chain: Certificate and authority, in PEM.
            pin: Pin of the expected authority.
            now: Unix time by the clock of this machine, to check the dates of the certificate; None does not check.

        Raises:
            IdentityError: The chain is not of the pinned authority, not for this key, or not valid now.
        """
        try:
            certificates = x509.load_pem_x509_certificates(chain)
            public, root = certificates[0].public_key(), certificates[-1]
            certificates[0].verify_directly_issued_by(root)
        except Exception as error:  # ASN.1 errors have many classes
            raise IdentityError(f"a certificate needs to come with its authority's, in PEM: {error}") from error
        if pin_of(root.public_key()) != pin:
            raise IdentityError("the certificate needs to be of the authority that the join was for, got another one")
        if pin_of(public) != pin_of(self._key.public_key()):
            raise IdentityError("the certificate needs to be for the key of the request, got one for another key")
        if now is not None:
            _check_clock(certificates[0], now)
        return Credentials(chain=chain, key=_text_of(self._key), authority=root.public_bytes(_PEM))


def _check_clock(certificate: x509.Certificate, now: float) -> None:
    """Refuse a certificate that was made just now, but is not valid by the clock of this machine.

    Raises:
        IdentityError: The clocks of both machines differ by too much.
    """
    made_at = certificate.not_valid_before_utc.timestamp() + limits.CLOCK_SKEW_SECONDS
    is_early = now < certificate.not_valid_before_utc.timestamp()
    if is_early or now > certificate.not_valid_after_utc.timestamp():
        apart = timedelta(seconds=round(abs(made_at - now)))
        where = "behind" if is_early else "ahead of"
        raise IdentityError(
            f"the clock of this machine must agree with the program's within limits.CLOCK_SKEW_SECONDS "
            f"({limits.CLOCK_SKEW_SECONDS:g} s), and is {apart} {where} it: set the clocks of both machines (NTP)"
        )


def pin_of(public: CertificatePublicKeyTypes) -> bytes:
    """Return SHA-256 of a public key of `cryptography`, as SubjectPublicKeyInfo."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(public.public_bytes(serialization.Encoding.DER, form)).digest()


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _text_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    text: bytes = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return text


def _builder(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, now: float, seconds: float
) -> x509.CertificateBuilder:
    at = datetime.fromtimestamp(now, UTC)
    early = at - timedelta(seconds=limits.CLOCK_SKEW_SECONDS)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(early).not_valid_after(at + timedelta(seconds=seconds))


def _usage(*, certifies: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not certifies,
        key_cert_sign=certifies,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


# ---- certificates of a site, from files that cert-manager, SPIFFE helpers or users write -----------------------------


def read_own_pki(
    *, certificate: str | Path, key: str | Path, authority: str | Path, peers: tuple[str, ...]
) -> Credentials:
    """Read credentials from three PEM files, all of them required.

    Args:
        certificate: The own certificate, then those up to the authority.
        key: Its private key, without a password; owned by this user or root, readable by the owner only.
        authority: The authority that certifies the peers.
        peers: Accepted names of peers: the URI, or else the DNS name, in their certificates. Required, as the
            authority of a site certifies others, too.

    Raises:
        IdentityError: A file cannot be read or is no PEM, others can read the key, or no peer is named.
    """
    if not peers:
        raise IdentityError(
            "own certificates need peers=(...), the names of the hosts to trust, as an authority certifies others, "
            'too: write peers=("n1.example", "n2.example")'
        )
    return Credentials(
        chain=_read(certificate, "certificate"),
        key=_read(key, "key", is_secret=True),
        authority=_read(authority, "authority"),
        peers=tuple(peers),
    )


class ForeignAuthority:
    """Stands in for `Authority` in a mesh that certifies no hosts: another authority does, or sessions are plain.

    Hosts still join by a token. Their certificates do not name incarnations, so each connection of a host must prove
    the token by which it joined (TK-4).

    Args:
        credentials: Credentials of this process.

    Attributes:
        pin: 32 random bytes, not the digest of a key.
        mesh: The first 16 of them: id of the mesh.
        own: The credentials of this process.
    """

    def __init__(self, credentials: Credentials) -> None:
        self.pin = secrets.token_bytes(32)
        self.mesh = self.pin[:16]
        self.own = credentials
        self._joined = set[ProcId]()

    def credentials(self, incarnation: ProcId, now: float) -> Credentials:
        """Return the credentials of this process."""
        del incarnation, now
        return self.own

    def has_joined(self, incarnation: ProcId) -> bool:
        """Return whether an incarnation has ever joined."""
        return incarnation in self._joined

    def admit(self, incarnation: ProcId) -> None:
        """Record that an incarnation has joined.

        Raises:
            IdentityError: It has joined before.
            LimitExceeded: `limits.CERTIFIED_MAX` incarnations have joined.
        """
        if incarnation in self._joined:
            raise IdentityError(f"an incarnation joins once, and {incarnation:016x} has joined")
        if len(self._joined) >= limits.CERTIFIED_MAX:
            raise LimitExceeded("CERTIFIED_MAX", limits.CERTIFIED_MAX, "too many hosts have joined this mesh")
        self._joined.add(incarnation)


def _read(path: str | Path, what: str, *, is_secret: bool = False) -> bytes:
    try:
        with Path(path).expanduser().open("rb") as file:
            if is_secret:
                _check_secret(os.fstat(file.fileno()), path)  # the opened file: the path may name another one by now
            text = file.read(limits.PKI_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise IdentityError(f"the {what} needs to be a readable file, got {path}: {error.strerror}") from error
    if len(text) > limits.PKI_FILE_BYTES_MAX:
        raise IdentityError(f"the {what} needs to be a file of at most {limits.PKI_FILE_BYTES_MAX} bytes, got {path}")
    if b"-----BEGIN " not in text:
        raise IdentityError(f"the {what} needs to be a file in PEM, got {path} without a line -----BEGIN ...")
    return text


def _check_secret(found: os.stat_result, path: str | Path) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise IdentityError(
            f"a private key needs to be readable by its owner only, got {path} with mode {mode:04o}; "
            f"write: chmod 600 {path}"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise IdentityError(
            f"a private key needs to belong to this user ({os.geteuid()}) or to root, got {path} of user {found.st_uid}"
        )


# ---- checks of such files on this host, for `trimesh doctor` ---------------------------------------------------------

_FORM: Final = "%Y-%m-%d %H:%M %Z"


def look_at(credentials: Credentials, now: datetime) -> datetime:
    """Check certificates, key and authority locally, without contacting a peer.

    Args:
        credentials: Credentials as `read_own_pki` returns them.
        now: Time with a time zone.

    Returns:
        The earliest expiry of the needed certificates.

    Raises:
        IdentityError: A file is invalid; the message names it.
    """
    chain = _certificates(credentials.chain, "certificate")
    authorities = _certificates(credentials.authority, "authority")
    try:
        key = serialization.load_pem_private_key(credentials.key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise IdentityError(f"the key needs to be a private key in PEM without a password: {error}") from None
    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) != chain[0].public_key().public_bytes(*form):
        raise IdentityError("the key needs to be that of the first certificate in the file, and is another one")
    _check_names(chain[0])
    needed = [*chain, _issuer_of(chain, authorities)]
    for one in needed:
        _check_dates(one, now)
    return min(one.not_valid_after_utc for one in needed)


def _certificates(text: bytes, what: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text)
    except ValueError as error:
        raise IdentityError(f"the {what} needs to be a file of certificates in PEM: {error}") from None


def _issuer_of(chain: list[x509.Certificate], authorities: list[x509.Certificate]) -> x509.Certificate:
    """Return the authority of the last certificate of a chain; check that each other one is signed by the next."""
    for one, issuer in pairwise(chain):
        if not _has_issued(issuer, one):
            raise IdentityError(
                f"each certificate in the file needs to be signed by the next one, and {_name(issuer)} has not signed "
                f"that of {_name(one)}"
            )
    for authority in authorities:
        if authority == chain[-1] or _has_issued(authority, chain[-1]):
            return authority
    raise IdentityError(
        f"the last certificate in the file, of {_name(chain[-1])}, needs to be signed by the authority, "
        f"{', '.join(map(_name, authorities))}, and was issued by {chain[-1].issuer.rfc4514_string()!r}"
    )


def _has_issued(issuer: x509.Certificate, one: x509.Certificate) -> bool:
    try:
        one.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_names(one: x509.Certificate) -> None:
    try:
        names = one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        names = None
    kinds = (x509.UniformResourceIdentifier, x509.DNSName)
    if names is None or not any(names.get_values_for_type(kind) for kind in kinds):
        raise IdentityError("the certificate needs to name its host by a URI or a DNS name, and has neither")


def _check_dates(one: x509.Certificate, now: datetime) -> None:
    begins, ends = one.not_valid_before_utc, one.not_valid_after_utc
    if now < begins:
        raise IdentityError(f"the certificate of {_name(one)} is not valid before {begins:{_FORM}}")
    if now > ends:
        raise IdentityError(f"the certificate of {_name(one)} expired at {ends:{_FORM}}")


def _name(one: x509.Certificate) -> str:
    return repr(one.subject.rfc4514_string() or f"serial number {one.serial_number:x}")


# ---- tokens by which hosts join: 256 bits, used once, five minutes; PURE, the caller passes the time -----------------

_PREFIX: Final = "trimesh-join-1"
_PLAIN_PREFIX: Final = "trimesh-plain-1"
"""Prefix of a token for sessions without TLS: only such a token turns TLS off on a host."""

_LABEL: Final = b"trimesh join 1\0"
_NUMBER_BYTES: Final = 16
_SECRET_BYTES: Final = 32
_PIN_BYTES: Final = 32


class JoinToken(msgspec.Struct, frozen=True):
    """Join token of a host. Pass its secret `text` by stdin, a 0600 file or a Secret, never by argument or variable.

    Attributes:
        number: Id of the token, 16 bytes; not secret.
        secret: 32 bytes.
        pin: Pin of the mesh's authority, see `Authority.pin` and `ForeignAuthority.pin`.
        is_plain: Whether sessions of the mesh are without TLS.
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
        """Id of the mesh that it admits to, 16 bytes."""
        return self.pin[:16]

    @staticmethod
    def parse(text: str) -> JoinToken:
        """Parse `text`. The error contains nothing of it.

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
                f"a join token must be one line that begins with {_PREFIX}:, as door.token() returns it, got "
                f"{len(text)} other characters"
            )
        number, secret = raw[:_NUMBER_BYTES], raw[_NUMBER_BYTES : _NUMBER_BYTES + _SECRET_BYTES]
        return JoinToken(number, secret, raw[_NUMBER_BYTES + _SECRET_BYTES :], head == _PLAIN_PREFIX)


def proof_of(secret: bytes, exporter: bytes, mesh: bytes, incarnation: ProcId) -> bytes:
    """Return the proof of knowing a token, 32 bytes, valid only in the session of `exporter`."""
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
    """Tokens of one door. Times are of one monotonic clock."""

    def __init__(self, pin: bytes, *, keeps_spent: bool = False, is_plain: bool = False) -> None:
        """Begin without tokens.

        Args:
            pin: Pin of the mesh's authority.
            keeps_spent: True if hosts prove their token again after they joined (TK-4).
            is_plain: Whether sessions of the mesh are without TLS.
        """
        if len(pin) != _PIN_BYTES:
            raise ValueError(f"a pin must have {_PIN_BYTES} bytes, got {len(pin)}")
        self._pin = pin
        self._issued: dict[bytes, _Issued] = {}
        self._over: dict[bytes, str] = {}
        self._keeps_spent = keeps_spent
        self._is_plain = is_plain
        self._spent: dict[ProcId, _Spent] = {}

    def __len__(self) -> int:
        """Count the tokens that were issued, and are neither used nor dropped for their age."""
        return len(self._issued)

    def __contains__(self, number: bytes) -> bool:
        """Return whether a token of this number is issued and unused; an expired one counts until it is dropped."""
        return number in self._issued

    def issue(self, now: float) -> JoinToken:
        """Return a new token, valid for `limits.JOIN_TOKEN_SECONDS`.

        Raises:
            LimitExceeded: `limits.JOIN_TOKENS_MAX` tokens are unused.
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
        """Use up a token if it is unused, not too old, and proven; return whether it was.

        Args:
            number: Id of the token, from the peer.
            proof: Proof of knowing the token, from the peer.
            exporter: Exporter of the session with the peer, taken on this side.
            incarnation: Incarnation in the hello of the peer.
            now: The time.
        """
        self._forget_old(now)
        issued = self._issued.get(number)
        secret = issued.secret if issued is not None else bytes(_SECRET_BYTES)  # so an unknown number takes as long
        expected = proof_of(secret, exporter, self._pin[:16], incarnation)
        is_proven = hmac.compare_digest(expected, proof)
        if issued is None or not is_proven:
            return False
        del self._issued[number]
        self._remember(number, "it admits one host, and a host has joined by it")
        if self._keeps_spent:
            self._spent[incarnation] = _Spent(number, issued.secret)
        return True

    def is_again(self, number: bytes, proof: bytes, *, exporter: bytes, incarnation: ProcId) -> bool:
        """Return whether a peer knows the token by which its incarnation joined (TK-4)."""
        spent = self._spent.get(incarnation)
        secret = spent.secret if spent is not None else bytes(_SECRET_BYTES)
        is_proven = hmac.compare_digest(proof_of(secret, exporter, self._pin[:16], incarnation), proof)
        return spent is not None and spent.number == number and is_proven

    def forget(self, incarnation: ProcId) -> None:
        """Drop the spent token of an incarnation."""
        self._spent.pop(incarnation, None)

    def why_refused(self, number: bytes) -> str:
        """Return why a token was refused just now, for this side only; the peer does not learn it (TK-3)."""
        if number in self._issued:
            return "its proof is wrong: the peer knows the number of the token, not its secret"
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
