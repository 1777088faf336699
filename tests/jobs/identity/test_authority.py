"""The authority of a mesh: whom it certifies, as what; own PKI by files."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from trimesh import limits
from trimesh.errors import LimitExceeded
from trimesh.ids import ProcId

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from trimesh.jobs.identity import (
    Authority,
    Credentials,
    IdentityError,
    KeyRequest,
    look_at,
    name_of,
    pin_of,
    read_own_pki,
)

NOW = 1_790_000_000.0


def names_of(chain: bytes) -> list[str]:
    extension = x509.load_pem_x509_certificates(chain)[0].extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    return extension.value.get_values_for_type(x509.UniformResourceIdentifier)


def test_request_gets_the_name_that_the_caller_says() -> None:
    authority, request = Authority(NOW), KeyRequest()
    chain = authority.certify(request.text, ProcId(255), NOW)

    assert names_of(chain) == [f"trimesh://{authority.mesh.hex()}/00000000000000ff"]
    assert request.credentials(chain, authority.pin).authority == authority.certificate


def test_request_that_asks_to_certify_others_does_not_get_that() -> None:
    authority, key = Authority(NOW), ec.generate_private_key(ec.SECP256R1())
    greedy = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([]))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier("trimesh://x/1")]), critical=True)
        .sign(key, hashes.SHA256())
    )
    chain = authority.certify(greedy.public_bytes(serialization.Encoding.PEM), ProcId(2), NOW)
    certificate = x509.load_pem_x509_certificates(chain)[0]

    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert names_of(chain) == [name_of(authority.mesh, ProcId(2))]


def test_incarnation_is_certified_once() -> None:
    authority = Authority(NOW)
    authority.credentials(ProcId(1), NOW)

    with pytest.raises(IdentityError, match="an incarnation gets one certificate"):
        authority.certify(KeyRequest().text, ProcId(1), NOW)


def test_certified_incarnations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CERTIFIED_MAX", 1)
    authority = Authority(NOW)
    authority.credentials(ProcId(1), NOW)

    with pytest.raises(LimitExceeded, match="too many hosts have joined"):
        authority.credentials(ProcId(2), NOW)


def test_what_is_no_request_is_refused_in_words() -> None:
    authority, right = Authority(NOW), KeyRequest().text
    other_kind = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    ed = other_kind.sign(ed25519.Ed25519PrivateKey.generate(), None).public_bytes(serialization.Encoding.PEM)
    wrong = {
        b"": "PKCS #10",
        b"x" * 5_000: r"at most limits.KEY_REQUEST_BYTES_MAX \(4096\) bytes",
        right[:200]: "PKCS #10",
        ed: "P-256",
    }

    for text, words in wrong.items():
        with pytest.raises(IdentityError, match=words):
            authority.certify(text, ProcId(1), NOW)


def test_certificate_of_another_authority_or_key_is_not_taken() -> None:
    authority, request = Authority(NOW), KeyRequest()
    chain = authority.certify(request.text, ProcId(1), NOW)

    with pytest.raises(IdentityError, match="of the authority that the join was for"):
        request.credentials(chain, Authority(NOW).pin)
    with pytest.raises(IdentityError, match="for the key of the request"):
        KeyRequest().credentials(chain, authority.pin)
    with pytest.raises(IdentityError, match="in PEM"):
        request.credentials(b"nothing", authority.pin)


def test_certificates_say_what_they_are_for() -> None:
    """An authority certifies hosts and nothing else; hosts take both sides of TLS, and certify none."""
    authority = Authority(NOW)
    chain = x509.load_pem_x509_certificates(authority.credentials(ProcId(1), NOW).chain)
    leaf, root = (one.extensions for one in chain)
    assert chain[1].public_bytes(serialization.Encoding.PEM) == authority.certificate
    assert [one.get_extension_for_class(x509.BasicConstraints).critical for one in (leaf, root)] == [True, True]
    limits_of = [one.get_extension_for_class(x509.BasicConstraints).value for one in (leaf, root)]
    assert [(one.ca, one.path_length) for one in limits_of] == [(False, None), (True, 0)]
    usages = [one.get_extension_for_class(x509.KeyUsage) for one in (leaf, root)]
    assert [one.critical for one in usages] == [True, True]
    assert [(one.value.digital_signature, one.value.key_cert_sign, one.value.crl_sign) for one in usages] == [
        (True, False, False),
        (False, True, usages[1].value.crl_sign),
    ]
    assert leaf.get_extension_for_class(x509.SubjectAlternativeName).critical
    purposes = leaf.get_extension_for_class(x509.ExtendedKeyUsage)
    assert (purposes.critical, len(purposes.value)) == (False, 2)
    issuer = leaf.get_extension_for_class(x509.AuthorityKeyIdentifier)
    own = root.get_extension_for_class(x509.SubjectKeyIdentifier)
    assert issuer.value.key_identifier == own.value.digest
    assert (issuer.critical, own.critical) == (False, False)
    assert authority.pin == pin_of(chain[1].public_key())
    assert authority.mesh == authority.pin[:16]
    chain[0].verify_directly_issued_by(chain[1])


@pytest.mark.parametrize(("mesh", "incarnation"), [(15, 1), (17, 1), (16, 0), (16, 1 << 64)])
def test_name_needs_a_mesh_and_an_incarnation(mesh: int, incarnation: int) -> None:
    with pytest.raises(ValueError, match="a name needs a mesh of 16 bytes and an incarnation from 1 on"):
        name_of(bytes(mesh), ProcId(incarnation))


def test_request_at_its_limit_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    text = KeyRequest().text
    monkeypatch.setattr(limits, "KEY_REQUEST_BYTES_MAX", len(text))
    assert Authority(NOW).certify(text, ProcId(1), NOW)
    monkeypatch.setattr(limits, "KEY_REQUEST_BYTES_MAX", len(text) - 1)
    with pytest.raises(IdentityError, match="KEY_REQUEST_BYTES_MAX"):
        Authority(NOW).certify(text, ProcId(1), NOW)


def at(now: float) -> datetime:
    return datetime.fromtimestamp(now, UTC)


def test_credentials_are_looked_at_without_a_peer() -> None:
    authority = Authority(NOW)
    one, other = (authority.credentials(ProcId(number), NOW) for number in (1, 2))
    ends = look_at(one, at(NOW))
    leaf, root = x509.load_pem_x509_certificates(one.chain)
    assert ends == min(leaf.not_valid_after_utc, root.not_valid_after_utc)
    assert look_at(one, leaf.not_valid_before_utc) == look_at(one, ends) == ends
    late, early = ends + timedelta(seconds=1), leaf.not_valid_before_utc - timedelta(seconds=1)
    alone = leaf.public_bytes(serialization.Encoding.PEM)
    assert look_at(replaced(one, chain=alone), at(NOW)) == ends
    foreign = Authority(NOW)
    wrong: list[tuple[Credentials, datetime, str]] = [
        (one, late, "the certificate of .* expired at "),
        (one, early, "the certificate of .* is not valid before "),
        (replaced(one, chain=b"no"), at(NOW), "the certificate needs to be a file of certificates in PEM"),
        (replaced(one, authority=b"no"), at(NOW), "the authority needs to be a file of certificates in PEM"),
        (replaced(one, key=b"no"), at(NOW), "the key needs to be a private key in PEM without a password"),
        (replaced(one, key=other.key), at(NOW), "the key needs to be that of the first certificate"),
        (replaced(one, chain=alone + foreign.certificate), at(NOW), "needs to be signed by the next one, and"),
        (replaced(one, chain=alone, authority=foreign.certificate), at(NOW), "needs to be signed by the authority, "),
    ]
    for credentials, now, words in wrong:
        with pytest.raises(IdentityError, match=words):
            look_at(credentials, now)


def replaced(credentials: Credentials, **fields: bytes) -> Credentials:
    own = {"chain": credentials.chain, "key": credentials.key, "authority": credentials.authority}
    return Credentials(**{**own, **fields})


def test_certificate_needs_a_name_for_its_host() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "n1")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 7, at(NOW), at(NOW + 60))
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for names, is_right in (
        ([], False),
        ([x509.RFC822Name("a@n1.example")], False),
        ([x509.DNSName("n1.example")], True),
        ([x509.RFC822Name("a@n1.example"), x509.UniformResourceIdentifier("spiffe://n1")], True),
    ):
        made = builder.add_extension(x509.SubjectAlternativeName(names), critical=False) if names else builder
        chain = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        credentials = Credentials(chain=chain, key=text, authority=chain)
        if is_right:
            assert look_at(credentials, at(NOW)) == at(NOW + 60)
            continue
        with pytest.raises(IdentityError, match="needs to name its host by a URI or a DNS name"):
            look_at(credentials, at(NOW))


def test_clocks_must_agree() -> None:
    authority, request = Authority(NOW), KeyRequest()
    chain = authority.certify(request.text, ProcId(1), NOW)
    leaf = x509.load_pem_x509_certificates(chain)[0]
    begins, ends = leaf.not_valid_before_utc.timestamp(), leaf.not_valid_after_utc.timestamp()
    for now in (begins, NOW, ends):
        assert request.credentials(chain, authority.pin, now)
    apart = str(timedelta(seconds=round(limits.CLOCK_SKEW_SECONDS) + 1))
    with pytest.raises(IdentityError, match=f"and is {apart} behind it"):
        request.credentials(chain, authority.pin, begins - 1)
    with pytest.raises(IdentityError, match="ahead of it: set the clocks"):
        request.credentials(chain, authority.pin, ends + 1)


def test_keys_are_not_shown() -> None:
    credentials = Authority(NOW).credentials(ProcId(1), NOW)

    assert b"PRIVATE KEY" in credentials.key
    assert "PRIVATE" not in repr(credentials)


# ---- own PKI ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    credentials = Authority(NOW).credentials(ProcId(1), NOW)
    found = {"certificate": credentials.chain, "key": credentials.key, "authority": credentials.authority}
    for name, text in found.items():
        (tmp_path / name).touch(mode=0o600)
        (tmp_path / name).write_bytes(text)
    return {name: tmp_path / name for name in found}


def test_own_pki_is_read_from_files_and_names_its_peers(files: dict[str, Path]) -> None:
    credentials = read_own_pki(**files, peers=("n1.example",))

    assert b"PRIVATE KEY" in credentials.key
    assert credentials.accepts("n1.example")
    assert not credentials.accepts("n2.example")
    assert not credentials.accepts(None)
    assert not credentials.has_names


def test_own_pki_needs_peers(files: dict[str, Path]) -> None:
    with pytest.raises(IdentityError, match="need peers="):
        read_own_pki(**files, peers=())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_key_that_others_can_read_is_refused(files: dict[str, Path], mode: int) -> None:
    files["key"].chmod(mode)

    with pytest.raises(IdentityError, match=f"with mode {mode:04o}; write: chmod 600"):
        read_own_pki(**files, peers=("n1",))


def test_key_of_another_user_is_refused(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_321)
    if files["key"].stat().st_uid == 0:
        os.chown(files["key"], 1_234, -1)

    with pytest.raises(IdentityError, match=r"needs to belong to this user \(4321\)"):
        read_own_pki(**files, peers=("n1",))


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
def test_file_that_is_missing_or_wrong_is_refused_in_words(files: dict[str, Path], name: str) -> None:
    files[name].write_bytes(b"not in PEM")
    with pytest.raises(IdentityError, match=f"the {name} needs to be a file in PEM"):
        read_own_pki(**files, peers=("n1",))
    files[name].unlink()
    with pytest.raises(IdentityError, match=f"the {name} needs to be a readable file"):
        read_own_pki(**files, peers=("n1",))


def test_names_of_a_mesh_are_checked_by_sessions_not_here() -> None:
    assert Credentials(b"", b"", b"").accepts("trimesh://anything")


def test_nothing_of_it_is_imported_by_trimesh() -> None:
    script = "import sys, trimesh; print([m for m in sys.modules if m.startswith(('trimesh.jobs', 'cryptography'))])"

    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"
