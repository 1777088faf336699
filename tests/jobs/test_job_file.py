"""Jobs that a file names, and scripts that run on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from trimesh import jobs
from trimesh._native import tls
from trimesh.errors import ConfigError

FILE = """
job = "laptop"

[jobs.laptop]
kind = "local"
hosts = 2

[jobs.far]
kind = "ssh"
hosts = { trainers = ["n1", "me@n2"], loaders = ["n3"] }
options = ["-p", "2222"]
env = { OMP_NUM_THREADS = "1" }

[jobs.big]
kind = "slurm"
hosts = 4
gpus = 8
time = "4:00:00"
via = { host = "login", options = ["-p", "2222"] }
shared = true
"""
SHOW = "import sys; from trimesh import jobs; print(jobs.default(), sys.argv[1:])"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIMESH_CONFIG", str(tmp_path / "trimesh.toml"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trimesh.toml").write_text(FILE)
    return tmp_path


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=os.environ | variables, capture_output=True, text=True, check=False
    )


def trimesh_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("cyclopts")
    return run("-m", "trimesh.cli", "run", *arguments)


def test_jobs_are_the_values_that_a_program_would_write(folder: Path) -> None:
    """H17."""
    assert jobs.named_job("laptop") == jobs.LocalJob(2)
    via = jobs.SSH("login", options=("-p", "2222"))
    assert jobs.named_job("big") == jobs.SlurmJob(4, gpus=8, time="4:00:00", via=via, shared=True)
    far = jobs.SSHJob(
        {"trainers": ["n1", "me@n2"], "loaders": ["n3"]}, options=("-p", "2222"), env={"OMP_NUM_THREADS": "1"}
    )
    assert jobs.named_job("far") == far


def test_default_is_what_the_file_the_environment_or_the_command_says(folder: Path) -> None:
    """H17."""
    script = folder / "script.py"
    script.write_text(SHOW)
    assert run(str(script)).stdout == f"{jobs.LocalJob(2)} []\n"
    assert run(str(script), TRIMESH_JOB="big").stdout == f"{jobs.named_job('big')} []\n"
    assert trimesh_run(str(script), "-x", "--epochs", "3").stdout == f"{jobs.LocalJob(2)} ['-x', '--epochs', '3']\n"
    assert trimesh_run("--job", "far", str(script), "a").stdout == f"{jobs.named_job('far')} ['a']\n"
    assert run(str(script), TRIMESH_CONFIG="").stdout == f"{jobs.LocalJob(1)} []\n"


def test_default_follows_its_setting(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H17."""
    assert jobs.default() == jobs.LocalJob(2)
    monkeypatch.setenv("TRIMESH_JOB", "big")
    assert jobs.default() == jobs.named_job("big")
    monkeypatch.setenv("TRIMESH_JOB", "kept:night")
    assert repr(jobs.default()) == repr(jobs.attach("night"))
    assert "night" in repr(jobs.default())
    monkeypatch.setenv("TRIMESH_CONFIG", "")
    monkeypatch.setenv("TRIMESH_JOB", "big")
    with pytest.raises(ConfigError, match=r"^a file trimesh.toml must have a table \[jobs.big\]"):
        jobs.default()
    monkeypatch.setenv("TRIMESH_JOB", "")
    assert jobs.default() == jobs.LocalJob(1)


@pytest.mark.daily
@pytest.mark.real
@pytest.mark.skipif(not tls.library()[0], reason=tls.library()[1])
def test_script_runs_on_the_hosts_of_its_job(folder: Path) -> None:
    """H17: and its exit code is that of the command."""
    script = folder / "script.py"
    script.write_text(
        "import sys, trio\n"
        "from trimesh import jobs\n"
        "async def main():\n"
        "    async with jobs.default() as hosts:\n"
        "        codes = await hosts.run(['true'])\n"
        "        print(hosts.extent, list(codes.values()))\n"
        "trio.run(main)\n"
        "sys.exit(7)\n"
    )
    done = trimesh_run(str(script))
    assert (done.stdout, done.returncode) == ("Extent(hosts=2) [0, 0]\n", 7), done.stderr


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("", r"must have a table \[jobs.x\] for the job 'x'; it has none"),
        ("[jobs]\nx = 3", r"jobs must hold a table for each job, \[jobs.NAME\]"),
        ("[jobs.x]\nhosts = 2", "jobs.x.kind must be one of local, ssh, slurm, kubernetes, got None"),
        ("[jobs.x]\nkind = 'cloud'\nhosts = 2", "got 'cloud'"),
        ("[jobs.x]\nkind = ['local']\nhosts = 2", r"got \['local'\]"),
        ("[jobs.x]\nkind = 'local'", "jobs.x.hosts must be given: the names of the hosts, or how many"),
        ("[jobs.x]\nkind = 'local'\nhosts = 2\ngpus = 8", "jobs.x.gpus is no field of LocalJob: there are apart"),
        ("[jobs.x]\nkind = 'slurm'\nhosts = 2\ngpus = '8'", "jobs.x.gpus has the wrong type: Expected `int | null`"),
        (
            "[jobs.x]\nkind = 'ssh'\nhosts = ['n']\noptions = '-v'",
            "jobs.x.options has the wrong type: Expected `array`",
        ),
        ("[jobs.x]\nkind = 'ssh'\nhosts = ['-oProxyCommand=x']", "jobs.x: the name of a host must be one"),
        ("[jobs.x]\nkind = 'local'\nhosts = 0", "jobs.x: each mesh of hosts must have a name and at least 1 host"),
        ("[jobs.x]\nkind = 'local'\nhosts = 1\n_entered = []", "jobs.x._entered is no field"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, table: str, said: str) -> None:
    """H17: file, table and key, what came, what is right."""
    file = folder / "wrong.toml"
    file.write_text(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIMESH_CONFIG", str(file))
        with pytest.raises(ConfigError, match=said) as caught:
            jobs.named_job("x")
    assert str(caught.value).startswith(str(file))


def test_command_says_what_is_wrong(folder: Path) -> None:
    """H17."""
    (folder / "script.py").write_text(SHOW)
    for arguments, said in (
        (("--job", "none", "script.py"), "it has 'laptop', 'far', 'big'"),
        (("nowhere.py",), "needs the file of a script, got 'nowhere.py'"),
    ):
        done = trimesh_run(*arguments)
        assert (done.returncode, said in done.stderr) == (2, True), done.stderr
