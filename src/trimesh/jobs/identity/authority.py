"""The certificate authority of one mesh: made by the outermost block, its key in memory only.

AU-1 What a request says of itself counts for nothing: its key is taken when the request shows that it has the private
half, all else comes from the caller. AU-2 An incarnation is certified once: another key never gets its name. AU-3 Only
the authority signs: a certified host cannot certify others.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

import msgspec

from trimesh import limits
from trimesh.errors import LimitExceeded, TrimeshError
from trimesh.ids import ID_MAX, ProcId

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes


class IdentityError(TrimeshError):
    """A certificate, key or token is not what it must be, or cannot be had."""


class Credentials(msgspec.Struct, frozen=True):
    """Certificate, key and authority of one incarnation. Its text shows no key.

    Attributes:
        chain: PEM: the own certificate, then those up to the authority.
        key: PEM of the private key, without a password.
        authority: PEM of who certifies the peers.
        peers: Names that peers may have in their certificates; () = the names of the mesh, which sessions check.
        is_plain: There are none, and nothing is encrypted: `insecure=` of a job says so.
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
        """Whether certificates carry names of the mesh."""
        return not self.peers and not self.is_plain

    def accepts(self, name: str | None) -> bool:
        """Tell whether a peer may have this name; it is None where the peer has shown no certificate."""
        return self.has_names or self.is_plain or name in self.peers


PLAIN: Final = Credentials(b"", b"", b"", is_plain=True)
"""What a process has where sessions are plain."""


def name_of(mesh: bytes, incarnation: ProcId) -> str:
    """Return the name of an incarnation, as certificates have it."""
    if len(mesh) != 16 or not 1 <= incarnation <= ID_MAX:
        raise ValueError(f"a name needs a mesh of 16 bytes and an incarnation from 1 on, got {mesh!r}, {incarnation}")
    return f"trimesh://{mesh.hex()}/{incarnation:016x}"


# ---- authority -------------------------------------------------------------------------------------------------------

try:
    from cryptography import x509
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
        certificate: Its own certificate, PEM.
        pin: SHA-256 of its public key (SubjectPublicKeyInfo): what a joining host knows it by.
        mesh: The first 16 bytes of that: the mesh, in names and hellos.
    """

    certificate: bytes
    pin: bytes
    mesh: bytes

    def __init__(self, now: float) -> None:
        """Make one; the key exists in this object only. Takes 1 ms.

        Args:
            now: Seconds since 1970, for the time from which it is valid.
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
        """Return certificate and key of an incarnation of this process."""
        key = _new_key()
        chain = self._certify(incarnation, key.public_key(), now)
        return Credentials(chain=chain, key=_text_of(key), authority=self.certificate)

    def certify(self, request: bytes, incarnation: ProcId, now: float) -> bytes:
        """Return the certificate chain, in PEM, for the key in a request of another process.

        Args:
            request: PKCS #10 in PEM, at most `limits.KEY_REQUEST_BYTES_MAX`.
            incarnation: Whose it will be: what the admitted peer has said in its hello.
            now: Seconds since 1970.

        Raises:
            IdentityError: It is no request, does not have the private half, or the incarnation is certified already.
            LimitExceeded: `limits.CERTIFIED_MAX` are.
        """
        if len(request) > limits.KEY_REQUEST_BYTES_MAX:
            raise IdentityError(
                f"a request for a certificate has at most {limits.KEY_REQUEST_BYTES_MAX} bytes, got {len(request)}"
            )
        try:
            asked = x509.load_pem_x509_csr(request)
            public = asked.public_key()
            is_proven = asked.is_signature_valid
        except Exception as error:  # of ASN.1 in many kinds
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
            raise LimitExceeded("CERTIFIED_MAX", limits.CERTIFIED_MAX, "this authority has certified too many hosts")
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
    """The key of a host that joins, which never leaves it, and the request for its certificate.

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
            chain: In PEM.
            pin: Of the authority.
            now: Seconds since 1970, by the clock of this machine; None does not look whether they count by that.

        Raises:
            IdentityError: The chain is not of the pinned authority, or not for this key.
        """
        try:
            certificates = x509.load_pem_x509_certificates(chain)
            public, root = certificates[0].public_key(), certificates[-1]
            certificates[0].verify_directly_issued_by(root)
        except Exception as error:  # of ASN.1 in many kinds
            raise IdentityError(f"a certificate needs to come with its authority's, in PEM: {error}") from error
        if pin_of(root.public_key()) != pin:
            raise IdentityError("the certificate needs to be of the authority that the join was for, got another one")
        if pin_of(public) != pin_of(self._key.public_key()):
            raise IdentityError("the certificate needs to be for the key of the request, got one for another key")
        if now is not None:
            _check_clock(certificates[0], now)
        return Credentials(chain=chain, key=_text_of(self._key), authority=root.public_bytes(_PEM))


def _check_clock(certificate: x509.Certificate, now: float) -> None:
    """Refuse a certificate that was made just now and does not count by the clock of this machine.

    Raises:
        IdentityError: The clocks of both machines differ by too much.
    """
    made_at = certificate.not_valid_before_utc.timestamp() + limits.CLOCK_SKEW_SECONDS
    is_early = now < certificate.not_valid_before_utc.timestamp()
    if is_early or now > certificate.not_valid_after_utc.timestamp():
        apart = timedelta(seconds=round(abs(made_at - now)))
        where = "behind" if is_early else "ahead of"
        raise IdentityError(
            f"the clock of this machine is {apart} {where} that of the program, and certificates allow for "
            f"limits.CLOCK_SKEW_SECONDS ({limits.CLOCK_SKEW_SECONDS:g} s): set the clocks of both machines (NTP)"
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
