"""Files of requirements, as hosts get them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimesh import limits
from trimesh.jobs.packages import Requirements, read_requirements


def test_files_that_are_taken_in_go_with_it(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "requirements.txt").write_text("-r sub/base.txt\n--constraint=sub/limits.txt # all\nnumpy==2\n")
    (tmp_path / "sub" / "base.txt").write_text("-c limits.txt\n-r ../requirements.txt\ntorch ; python_version > '3'\n")
    (tmp_path / "sub" / "limits.txt").write_text("trio<1\n")
    found = read_requirements(tmp_path / "requirements.txt")
    assert found.files == {
        "0.txt": "-r 1.txt\n--constraint=2.txt # all\nnumpy==2\n",
        "1.txt": "-c 2.txt\n-r 0.txt\ntorch ; python_version > '3'\n",
        "2.txt": "trio<1\n",
    }
    assert found.name == "requirements.txt"
    before = found.digest
    (tmp_path / "sub" / "limits.txt").write_text("trio<2\n")
    assert read_requirements(tmp_path / "requirements.txt").digest != before


def test_digest_is_that_of_what_decides() -> None:
    """H25: with the lock of uv, what uv makes of it is the same as the lock."""

    def digest(**files: str) -> str:
        return Requirements({name.replace("_", "."): text for name, text in files.items()}, "a").digest

    assert len(digest(first_txt="a")) == 40
    one = {"uv_lock": "1", "pyproject_toml": "2"}
    assert digest(**one) == Requirements({"uv.lock": "1", "pyproject.toml": "2", "0.txt": "3"}, "b").digest
    assert len({digest(**one | {name: "x"}) for name in ("uv_lock", "pyproject_toml", "more")}) == 3
    assert Requirements({"0.txt": "1"}, "a").digest != Requirements({"0.txt": "2"}, "a").digest


def test_what_is_far_away_stays_as_it_is(tmp_path: Path) -> None:
    text = "-r https://x.example/a.txt\n--find-links /shared/wheels\n-f https://x.example/\n--index-url https://x/\n"
    (tmp_path / "a.txt").write_text(text)
    assert read_requirements(tmp_path / "a.txt").files == {"0.txt": text}


@pytest.mark.parametrize("line", ["-e .", "--editable=../x", "./pkg", "../pkg[extra]", ".", "-f wheels", "-fwheels"])
def test_what_is_on_this_machine_only_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.txt").write_text(f"numpy\n{line}\n")
    with pytest.raises(ValueError, match=r"a\.txt:2 names a folder of this machine"):
        read_requirements(tmp_path / "a.txt")


def test_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REQUIREMENTS_BYTES_MAX", 10)
    (tmp_path / "a.txt").write_text("x" * 10)
    assert read_requirements(tmp_path / "a.txt").files == {"0.txt": "x" * 10}
    (tmp_path / "a.txt").write_text("x" * 11)
    with pytest.raises(ValueError, match="REQUIREMENTS_BYTES_MAX"):
        read_requirements(tmp_path / "a.txt")
    monkeypatch.setattr(limits, "REQUIREMENT_FILES_MAX", 1)
    (tmp_path / "a.txt").write_text("-r b.txt")
    with pytest.raises(ValueError, match="REQUIREMENT_FILES_MAX"):
        read_requirements(tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError):
        read_requirements(tmp_path / "none.txt")


def test_lock_goes_with_its_project_where_no_uv_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "uv.lock").write_text("version = 1\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    found = read_requirements(tmp_path / "uv.lock")
    assert found.files == {"uv.lock": "version = 1\n", "pyproject.toml": "[project]\n"}


UV = """#!/bin/sh
PATH=/usr/bin:/bin
echo "$*" > "$HOME/calls"
cat "$HOME/export"
"""


def test_uv_writes_what_hosts_without_it_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """H25: what it writes is checked as any file is."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "uv").write_text(UV)
    (tmp_path / "uv").chmod(0o700)
    texts = {"uv.lock": "version = 1\n", "pyproject.toml": "[project]\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    lock, export = tmp_path / "uv.lock", tmp_path / "export"
    with pytest.raises(OSError, match=r"uv cannot read .*uv\.lock: cat: .*export"):
        read_requirements(lock)
    export.write_text("trio<1\n")
    found = read_requirements(lock)
    assert (found.files, found.name) == ({**texts, "0.txt": "trio<1\n"}, "uv.lock")
    said = (tmp_path / "calls").read_text()
    assert said == f"export --frozen --no-dev --no-emit-workspace --no-header --quiet --project {tmp_path}\n"
    export.write_text("-e .\n")
    with pytest.raises(ValueError, match=r"uv\.lock:1 names a folder of this machine"):
        read_requirements(lock)
