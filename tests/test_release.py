"""The version of a release stands in several files; its wheels are found out when they are not what they should be."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_files_name_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)

    assert cited is not None
    assert cited[1] == project["version"]


@pytest.fixture
def library() -> bytes:
    return Path(sys.executable).resolve().read_bytes()  # an ELF file of this machine


def wheel_of(path: Path, files: dict[str, bytes], tag: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr("x-1.dist-info/WHEEL", f"Wheel-Version: 1.0\nTag: {tag}\n")
    return path


def test_wrong_wheels_are_found_out(tmp_path: Path, library: bytes) -> None:
    pytest.importorskip("elftools", reason="comes with the extra `dev`")
    from release import wheel

    files = dict.fromkeys(wheel.NEEDED, b"") | {"trimesh/_native/libtrimesh.so": library}
    path = wheel_of(tmp_path / "a.whl", files | {"trimesh/notes.txt": b""}, "py3-none-manylinux_2_17_x86_64")
    found = list(wheel.complaints(path, "aarch64-linux-musl"))

    assert "has trimesh/notes.txt, which is no part of the package" in found
    assert any("tags" in one for one in found)
    assert any("EM_AARCH64" in one for one in found)
    assert not wheel.is_old("GLIBC_2.18")
    assert wheel.is_old("GLIBC_2.2.5")


@pytest.mark.real
def test_smoke_program_runs() -> None:
    done = subprocess.run([sys.executable, ROOT / "release/smoke.py"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")
