"""Where settings are looked for, by programs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trimesh._runtime.system import user_files
from trimesh.errors import ConfigError

SHOW = "import trimesh; print(trimesh.config.current().grace)"


def run(folder: Path, script: str = SHOW, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRIMESH_CONFIG"}
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def shown(folder: Path, **variables: str) -> str:
    done = run(folder, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nearest_file_counts(tmp_path: Path):
    """G1: a project's without such a table is passed, and trimesh.toml comes before it."""
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.trimesh]\ngrace = 1\n")
    (tmp_path / "a" / "pyproject.toml").write_text('[project]\nname = "trimesh-user"\n')
    assert shown(inner) == "1.0"
    (tmp_path / "a" / "trimesh.toml").write_text("grace = 2\n")
    assert shown(inner) == "2.0"
    assert shown(tmp_path) == "1.0"
    assert shown(inner, TRIMESH_GRACE="3") == "3.0"


def test_file_may_be_named(tmp_path: Path):
    """G1: or none."""
    (tmp_path / "trimesh.toml").write_text("grace = 2\n")
    (tmp_path / "other.toml").write_text("grace = 4\n")
    assert shown(tmp_path, TRIMESH_CONFIG="other.toml") == "4.0"
    assert shown(tmp_path, TRIMESH_CONFIG="") == "5.0"


@pytest.mark.parametrize(
    ("text", "said"), [("grace = [", "cannot be read"), ("grcae = 1", "there is no setting 'grcae'")]
)
def test_wrong_file_is_named(tmp_path: Path, text: str, said: str):
    """G2."""
    (tmp_path / "trimesh.toml").write_text(text)
    done = run(tmp_path)
    assert f"ConfigError: {tmp_path}/trimesh.toml" in done.stderr
    assert said in done.stderr


def test_project_that_is_no_toml_is_for_its_tools(tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text("[trimesh")
    assert shown(tmp_path) == "5.0"


def test_file_that_others_may_write_is_refused(tmp_path: Path):
    """G2."""
    file = tmp_path / "trimesh.toml"
    file.write_text("grace = 2\n")
    file.chmod(0o666)
    assert "chmod o-w" in run(tmp_path).stderr


def test_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """G2."""
    file = tmp_path / "trimesh.toml"
    file.write_text("grace = 2\n")
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setenv("TRIMESH_CONFIG", str(file))
    with pytest.raises(ConfigError, match="must belong to this user or to root"):
        user_files.read_sources()


def test_import_reads_no_file(tmp_path: Path):
    """G1: a wrong one is told when a setting is needed."""
    (tmp_path / "trimesh.toml").write_text("wrong")
    assert run(tmp_path, "import trimesh").stderr == ""
