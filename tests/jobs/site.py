"""An authority of a site: certificates of hosts as files, which a job is given."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from trimesh import jobs

_PEM = serialization.Encoding.PEM
_USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


class Site:
    """Certifies hosts by names of DNS.

    Args:
        folder: For all files.
        peers: Names that hosts trust.
    """

    def __init__(self, folder: Path, *peers: str) -> None:
        self._folder = folder
        self._peers = peers
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority of a site")])
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(
            x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False
        )
        usage = dict.fromkeys(_USAGES, False) | {"key_cert_sign": True}
        builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
        folder.mkdir(exist_ok=True)
        self.authority = folder / "authority.pem"
        self.authority.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM))

    def host(self, name: str, *peers: str, hours: float = 1) -> jobs.OwnPKI:
        """Certify a host for so long; return what it is told of the files, with other peers if some are named."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(x509.Name([]), key.public_key(), hours)
        names = x509.SubjectAlternativeName([x509.DNSName(name)])
        chain = builder.add_extension(names, critical=True).sign(self._key, hashes.SHA256()).public_bytes(_PEM)
        form = serialization.PrivateFormat.PKCS8
        places = {"chain": self._folder / f"{name}.pem", "key": self._folder / f"{name}.key"}
        places["chain"].write_bytes(chain)
        places["key"].touch(mode=0o600)
        places["key"].write_bytes(key.private_bytes(_PEM, form, serialization.NoEncryption()))
        files = [str(one) for one in (places["chain"], places["key"], self.authority)]
        return jobs.OwnPKI(*files, peers=peers or self._peers)

    def _builder(
        self, subject: x509.Name, public: ec.EllipticCurvePublicKey, hours: float = 1
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(public)
        builder = builder.serial_number(x509.random_serial_number())
        # Python's own TLS insists on it since 3.13.
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        return builder.not_valid_before(now - timedelta(minutes=5)).not_valid_after(now + timedelta(hours=hours))
