"""`trimesh doctor` looks at the certificate files of jobs, before a job is entered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("cyclopts")
pytest.importorskip("cryptography")

from tests.jobs.site import Site

from trimesh.cli.doctor import findings
from trimesh.config import reread
from trimesh.jobs import OwnPKI


@pytest.fixture(autouse=True)
def settings_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Read them again without the file of a test."""
    yield
    monkeypatch.undo()
    reread()


def spoil_nothing(_site: Site, _other: Site, _pki: OwnPKI) -> None:
    """Leave it as it is."""


def let_others_read(_site: Site, _other: Site, pki: OwnPKI) -> None:
    Path(pki.key).chmod(0o640)


def remove_key(_site: Site, _other: Site, pki: OwnPKI) -> None:
    Path(pki.key).unlink()


def take_another_key(_site: Site, other: Site, pki: OwnPKI) -> None:
    Path(pki.key).write_bytes(Path(other.host("n1.example").key).read_bytes())


def take_another_authority(_site: Site, other: Site, pki: OwnPKI) -> None:
    Path(pki.authority).write_bytes(other.authority.read_bytes())


def let_expire(site: Site, _other: Site, _pki: OwnPKI) -> None:
    site.host("n1.example", hours=-0.05)  # which began five minutes ago


def write_no_certificate(_site: Site, _other: Site, pki: OwnPKI) -> None:
    Path(pki.certificate).write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")


@pytest.mark.parametrize(
    ("spoil", "verdict", "says"),
    [
        (spoil_nothing, "ok", "fit and are valid until"),
        (let_others_read, "forbids", "chmod 600"),
        (remove_key, "forbids", "readable file"),
        (take_another_key, "forbids", "needs to be that of the first certificate"),
        (take_another_authority, "forbids", "needs to be signed by the authority"),
        (let_expire, "forbids", "expired at"),
        (write_no_certificate, "forbids", "certificates in PEM"),
    ],
)
def test_certificate_files_of_a_job_are_looked_at(
    spoil: Callable[[Site, Site, OwnPKI], None],
    verdict: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """H7: readable by this user only, of one key, signed by the authority, valid now."""
    site, other = (Site(tmp_path / name, "n1.example") for name in ("site", "other"))
    pki = site.host("n1.example")
    spoil(site, other, pki)
    files = {"certificate": pki.certificate, "key": pki.key, "authority": pki.authority, "peers": list(pki.peers)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in files.items()]
    table = ["[jobs.lab]", 'kind = "local"', "hosts = 1", "[jobs.lab.pki]", *lines]
    (tmp_path / "trimesh.toml").write_text("\n".join(table) + "\n")
    monkeypatch.setenv("TRIMESH_CONFIG", str(tmp_path / "trimesh.toml"))
    found = {one.name: one for one in findings()}
    assert found["jobs.lab.pki"].verdict == verdict
    assert says in found["jobs.lab.pki"].text
