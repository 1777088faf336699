"""Which files of this machine belong to a tree."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from trimesh import limits
from trimesh.jobs.code.scanning import Scanner, digest_of

has_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code, which is the working directory."""
    folder = tmp_path / "project"
    for name in ("src/pkg/a.py", "src/pkg/data.bin", "src/pkg/__pycache__/a.pyc", "configs/one.yaml", "runs/1/log"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    monkeypatch.chdir(folder)
    return folder


def names(*paths: str, exclude: tuple[str, ...] = ()) -> set[str]:
    return {file.name for file in Scanner(paths, exclude).scan().manifest.files}


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)


def test_paths_keep_their_place_below_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "tool.py").touch()
    assert names("src", "configs/one.yaml") == {"src/pkg/a.py", "src/pkg/data.bin", "configs/one.yaml"}
    assert names(".") == {"src/pkg/a.py", "src/pkg/data.bin", "configs/one.yaml", "runs/1/log"}
    assert names("../library", "src") == {"library/tool.py", "src/pkg/a.py", "src/pkg/data.bin"}
    assert Scanner(["src", "configs/one.yaml", "../library"], ()).scan().manifest.import_paths == (
        "src",
        "configs",
        "library",
    )
    assert Scanner(["."], ()).scan().manifest.import_paths == ("",)


def test_patterns_leave_out_files_folders_and_paths() -> None:
    assert names(".", exclude=("*.bin", "runs")) == {"src/pkg/a.py", "configs/one.yaml"}
    assert names(".", exclude=("src/pkg", "runs/")) == {"configs/one.yaml"}
    assert names("src", exclude=("pkg/*.bin",)) == {"src/pkg/a.py"}


@has_git
def test_what_git_ignores_is_left_out(project: Path) -> None:
    """SC-1: tracked files that are gone, too; and files of a repository inside of it are there."""
    git(project, "init", "-q")
    (project / ".gitignore").write_text("runs/\n*.bin\n")
    git(project, "add", "configs")
    (project / "configs" / "one.yaml").unlink()
    (project / "vendored").mkdir()
    git(project / "vendored", "init", "-q")
    (project / "vendored" / "lib.py").touch()
    assert names(".") == {".gitignore", "src/pkg/a.py", "vendored/lib.py"}
    assert names("src") == {"src/pkg/a.py"}


def test_ignored_files_need_git(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / ".gitignore").write_text("runs/\n")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="git is needed"):
        names(".")


def test_links_and_permissions_are_those_of_the_files(project: Path) -> None:
    (project / "src" / "run.sh").write_text("#!/bin/sh\n")
    (project / "src" / "run.sh").chmod(0o755)
    (project / "src" / "link.py").symlink_to("pkg/a.py")
    (project / "src" / "folder").symlink_to("pkg")
    os.mkfifo(project / "src" / "pipe")
    files = {file.name: file for file in Scanner(["src"], ()).scan().manifest.files}
    assert files["src/link.py"].target == "pkg/a.py"
    assert files["src/folder"].target == "pkg"
    assert [name for name, file in files.items() if file.is_executable] == ["src/run.sh"]
    assert "src/pipe" not in files


def test_contents_are_hashed_when_their_files_have_changed(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SC-2."""
    scanner = Scanner(["src"], ())
    first = scanner.scan()
    read = list[str]()
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        read.append(path.name)
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert scanner.scan() == first
    assert read == []
    (project / "src" / "pkg" / "a.py").write_text("changed")
    second = scanner.scan()
    assert read == ["a.py"]
    assert digest_of(b"changed") in second.paths


def test_what_is_no_code_is_refused(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CODE_FILES_MAX", 3)
    with pytest.raises(ValueError, match="CODE_FILES_MAX"):
        names(".")
    monkeypatch.setattr(limits, "CODE_BYTES_MAX", 1_000)
    (project / "src" / "weights.pt").write_bytes(bytes(990))
    with pytest.raises(ValueError, match=r"CODE_BYTES_MAX .* largest\s+files are src/weights.pt"):
        names("src")
    with pytest.raises(ValueError, match="needs files or folders"):
        names()
    with pytest.raises(FileNotFoundError, match="'nothing'"):
        names("nothing")
    with pytest.raises(ValueError, match="must not overlap"):
        names("src", "src/pkg")
    (tmp_path / "src").mkdir()
    with pytest.raises(ValueError, match="must not overlap"):
        names("src", "../src")
    with pytest.raises(TypeError, match="list of patterns"):
        Scanner(["src"], "*.pt")
    (project / "configs" / os.fsdecode(b"\xff")).touch()
    with pytest.raises(ValueError, match="UTF-8"):
        names("configs")
    shutil.rmtree(project / "runs")
    scanner = Scanner(["configs/one.yaml"], ())
    (project / "configs" / "one.yaml").unlink()
    with pytest.raises(FileNotFoundError, match="is gone"):
        scanner.scan()
