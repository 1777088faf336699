"""Each launcher passes the cases that all must pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.jobs import sshd
from tests.jobs.joining import hosts_at_a_door

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls
from trimesh.jobs.local import LocalLauncher
from trimesh.jobs.ssh import SSHLauncher
from trimesh.testing import LAUNCHER_CASES, LauncherSubject, check_launcher

pytestmark = [pytest.mark.real, pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.SSHServer]:
    """An sshd for the tests of this file."""
    one = sshd.SSHServer(tmp_path_factory.mktemp("sshd"))
    yield one
    one.close()


@pytest.mark.parametrize("case", LAUNCHER_CASES)
def test_local_agents(case: str) -> None:
    """H1, H2, H4, H13: children of the program."""
    check_launcher(case, LauncherSubject(jobs.LocalJob))


# How a cancel, an error and a stop reach agents depends on no launcher; each remote one shows it in the long runs.
REMOTE_CASES = [
    case if case in ("mesh", "killed agent", "secrets") else pytest.param(case, marks=pytest.mark.stress)
    for case in LAUNCHER_CASES
]


@pytest.mark.skipif(sshd.missing() is not None, reason=sshd.missing() or "")
@pytest.mark.parametrize("case", REMOTE_CASES)
def test_agents_by_ssh(case: str, server: sshd.SSHServer) -> None:
    """H1, H2, H4, H13: below an sshd."""
    names = ["n1", "n2", "n3"]
    check_launcher(case, LauncherSubject(lambda count: jobs.SSHJob(names[:count], options=server.options)))
    server.wait_idle()


@pytest.mark.parametrize("case", REMOTE_CASES)
def test_agents_that_join(case: str) -> None:
    """H1, H2, H4, H13: started by others."""
    check_launcher(case, LauncherSubject(hosts_at_a_door, kills=False))


@pytest.mark.stress
@pytest.mark.parametrize("case", ["mesh", "killed agent"])
def test_cases_can_fail(case: str) -> None:
    """H13: a subject whose processes seem to live on, and one that has too few hosts."""
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        check_launcher(case, LauncherSubject(jobs.LocalJob, is_alive=lambda _host, _pid: True))
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        check_launcher(case, LauncherSubject(lambda _: jobs.LocalJob(1)))


class _OtherJob(jobs.LocalJob):
    def launcher(self) -> Any:
        """See `Job.launcher`."""
        return object()


async def test_launcher_of_another_class_is_refused() -> None:
    """One that only has the methods is told what to write."""
    with pytest.raises(TypeError, match=r"must return a jobs\.Launcher, .*: write class object\(jobs.Launcher\)"):
        async with _OtherJob(1):
            pass


def test_launcher_can_grow_if_it_defines_grow() -> None:
    assert LocalLauncher(1).can_grow
    assert not SSHLauncher(jobs.SSHJob(["n1"])).can_grow
