"""The version of a release stands in several files; its wheels are found out when they are not what they should be."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from release import changelog

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


# ---- the changelog ---------------------------------------------------------------------------------------------------

CHANGELOG = """# Changelog

## Unreleased

No alias is kept.

### Added

- One.

### Fixed

- Another,
  in two lines.

## 0.1

### Added

- Old.
"""


def test_fragments_come_to_their_sections() -> None:
    fragments = {"b.added.md": "- Two,\n  and more.\n", "a.added.md": "- Three.\n- Four.\n", "x.changed.md": "- Five."}

    text = changelog.assembled(CHANGELOG, fragments)

    part = text.partition("## Unreleased\n")[2].partition("\n## 0.1")[0]
    assert part == (
        "\nNo alias is kept.\n\n### Added\n\n- One.\n- Three.\n- Four.\n- Two,\n  and more.\n\n"
        "### Changed\n\n- Five.\n\n### Fixed\n\n- Another,\n  in two lines.\n"
    )
    assert text.endswith("\n## 0.1\n\n### Added\n\n- Old.\n")
    assert changelog.assembled(CHANGELOG, {}) == CHANGELOG


@pytest.mark.parametrize(
    ("name", "text"),
    [("New.added.md", "- x"), ("new.md", "- x"), ("new.new.md", "- x"), ("new.added.md", ""), ("n.fixed.md", "x\n- y")],
)
def test_wrong_fragments_are_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(name)):
        changelog.assembled(CHANGELOG, {name: text})


def test_fragments_that_wait_can_be_taken() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()

    assert changelog.assembled(text, {}) == text
    assert changelog.assembled(text, changelog.fragments()).count("\n### ") >= text.count("\n### ")
