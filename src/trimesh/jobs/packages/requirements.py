"""What is to be installed, as hosts get it: a file of requirements with those that it takes in, or the lock of uv.

    requirements.txt --> 0.txt, with `-r 1.txt` in place of `-r base.txt`; 1.txt
    uv.lock          --> uv.lock, pyproject.toml, for the uv of a host; and 0.txt, which the uv of this machine makes of
                         them for a host that has pip

Nothing of it is on this machine only.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from trimesh import limits

FIRST: Final = "0.txt"
LOCK: Final = "uv.lock"
PROJECT: Final = "pyproject.toml"
_EXPORT: Final = ("export", "--frozen", "--no-dev", "--no-emit-workspace", "--no-header", "--quiet", "--project")
"""Of uv: packages of a lock, but for those of the project itself."""

_TAKES_IN: Final = re.compile(r"(\s*(?:-r|-c|--requirement|--constraint)(?:\s+|=|(?<=-[rc])))(\S+)(.*)", re.DOTALL)
_IS_HERE: Final = re.compile(r"\s*(?:-e\b|--editable\b|\.{1,2}(?:/|\s|$)|(?:-f|--find-links)(?:\s+|=)?(?!/|\w+:)\S)")


class Requirements(msgspec.Struct, frozen=True):
    """Files that say what is to be installed.

    Attributes:
        files: Texts by their names.
        name: Of the file that was given, for errors.
    """

    files: Mapping[str, str]
    name: str

    @property
    def digest(self) -> str:
        said = [one for one in sorted(self.files.items()) if LOCK not in self.files or one[0] != FIRST]
        return hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:40]


def read_requirements(file: str | os.PathLike[str]) -> Requirements:
    """Read a file, and those that it takes in; run in a thread.

    Raises:
        OSError: One cannot be read, or uv fails.
        ValueError: It is too much, or names what is only on this machine.
    """
    path = Path(file)
    if path.name != LOCK:
        return Requirements(_Reader().read(path), path.name)
    project = path.with_name(PROJECT)
    texts = {LOCK: _text_of(path), PROJECT: _text_of(project)}
    uv = shutil.which("uv")
    if uv is None:
        return Requirements(texts, path.name)
    command = [uv, *_EXPORT, os.fspath(path.parent.resolve())]
    done = subprocess.run(  # noqa: S603 - uv of this machine, with a path that the program names
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, timeout=limits.UV_EXPORT_SECONDS
    )
    if done.returncode != 0:
        raise OSError(f"uv cannot read {path}: {done.stderr.strip()}")
    _check_is_anywhere(done.stdout, path)
    return Requirements({**texts, FIRST: done.stdout}, path.name)


class _Reader:
    """Reads a file and those that it takes in, each once, and gives them names of ours."""

    def __init__(self) -> None:
        self._names = dict[Path, str]()
        self._texts = dict[str, str]()

    def read(self, path: Path) -> Mapping[str, str]:
        self._add(path.absolute())
        return self._texts

    def _add(self, path: Path) -> str:
        path = Path(os.path.normpath(path))
        if path in self._names:
            return self._names[path]
        if len(self._names) >= limits.REQUIREMENT_FILES_MAX:
            raise ValueError(f"requirements are at most limits.REQUIREMENT_FILES_MAX files, and {path} is one more")
        name = self._names[path] = f"{len(self._names)}.txt"
        text = _text_of(path)
        _check_is_anywhere(text, path)
        self._texts[name] = "".join(self._line(line, path.parent) for line in text.splitlines(keepends=True))
        return name

    def _line(self, line: str, folder: Path) -> str:
        found = _TAKES_IN.fullmatch(line)
        if found is None or re.match(r"\w+://", found[2]):
            return line
        return f"{found[1]}{self._add(folder / found[2])}{found[3]}"


def _text_of(path: Path) -> str:
    size = path.stat().st_size
    if size > limits.REQUIREMENTS_BYTES_MAX:
        raise ValueError(
            f"a file of requirements has at most limits.REQUIREMENTS_BYTES_MAX ({limits.REQUIREMENTS_BYTES_MAX}) "
            f"bytes, got {path} with {size}"
        )
    return path.read_text(encoding="utf-8")


def _check_is_anywhere(text: str, path: Path) -> None:
    for number, line in enumerate(text.splitlines(), 1):
        if _IS_HERE.match(line):
            raise ValueError(
                f"hosts.install takes packages that hosts can get, and {path}:{number} names a folder beside it: "
                f"{line.strip()!r}; bring code by hosts.sync, or name a folder that all hosts have by its whole path"
            )
