"""Kept jobs with certificates of a site, or without TLS: programs that attach use what the job was kept with."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from tests.jobs.kept.keeping import double_on, kept_in
from tests.patience import HANG_SECONDS

from trimesh import MeshErrorGroup, jobs, leaves

pytest.importorskip("cryptography")

from tests.jobs.site import Site

from trimesh._native import tls
from trimesh.jobs.pki import UNDERSTOOD

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]

N1, N2 = "n1.example", "n2.example"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> Iterator[None]:
    with kept_in(tmp_path):
        yield


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "site", N1, N2)


async def test_certificates_of_a_site_are_kept_with_the_job(site: Site) -> None:
    """H7, H23: those of the job, until a program that attaches names others."""
    own, others = site.host(N1), site.host(N2)
    with trio.fail_after(HANG_SECONDS):
        await jobs.keep("lab", jobs.LocalJob(1, pki=own), lease=600)
        try:
            assert await double_on("lab") == [42]
            for pki, seen in ((None, own), (others, others)):
                await trio.Path(seen.key).unlink()
                with pytest.raises(MeshErrorGroup) as found:
                    await double_on("lab", pki=pki)
                [error] = leaves(found.value)
                assert f"the key needs to be a readable file, got {seen.key}" in str(error)
        finally:
            await jobs.stop("lab")


async def test_job_without_tls_is_kept_and_a_program_that_attaches_says_so(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """H7, H23: a program that attaches with certificates of its own has TLS."""
    caplog.set_level(logging.WARNING, "trimesh")

    def said() -> int:
        return sum("INSECURE" in record.getMessage() for record in caplog.records)

    with trio.fail_after(HANG_SECONDS):
        await jobs.keep("lab", jobs.LocalJob(1, insecure=UNDERSTOOD), lease=600)
        try:
            before = said()
            assert await double_on("lab") == [42]
            assert said() == before + 1
            assert await double_on("lab", pki=site.host(N1)) == [42]
            assert said() == before + 1
        finally:
            await jobs.stop("lab")
