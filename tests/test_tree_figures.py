"""The figures of a small tree that is made here, and that those of this tree can be had."""

from __future__ import annotations

import subprocess
from pathlib import Path
from textwrap import dedent

import pytest
from tests import prose_figures, tree_figures

ERRORS = '''
    """Two lines
    of docstring."""

    import os  # a comment
    from typing import (
        Protocol,
    )


    class Holder(Protocol):
        """It holds."""

        count: int
        """How many."""

        def take(self) -> int: ...


    class Wider(Holder, Protocol):
        def give(self) -> int: ...


    class Base:
        def __init__(self) -> None:
            self.count, self.rest = 1, 2

        def take(self) -> int:
            return self.count


    class Derived(Base):
        def give(self) -> int:
            return os.getpid()
'''
LOOP = """
    //! A loop.
    const Ring = struct {
        pub fn push(ring: *Ring) void {
            std.debug.assert(ring.free > 0);
            assert(ring.head != ring.tail); // assert(ring)
        }
        fn pop(ring: *Ring) void {}
    };
    test "pushes" {
        fn helper() void {}
        assert(true);
    }
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    files = {
        "src/trimesh/__init__.py": "from trimesh import errors\n",
        "src/trimesh/errors.py": dedent(ERRORS),
        "src/trimesh/_runtime/__init__.py": "",
        "src/trimesh/_runtime/life/proc.py": "x = 1\n",
        "native/src/rings/ring.zig": dedent(LOOP),
        "native/src/rings/fuzz_ring.zig": dedent(LOOP),
        "docs/guide.md": "# One two\n",
        "docs/design/index.md": "three\n",
        "docs/design/links.md": "## Four\n\nfive\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.removeprefix("\n"))
    return tmp_path


def test_figures_of_a_tree(tree: Path) -> None:
    found = tree_figures.figures(tree)

    source = dedent(ERRORS).removeprefix("\n").splitlines()
    assert found["lines"] == len(source) + 2
    assert found["docstring_lines"] == 4
    assert found["code_lines"] == len([line for line in source if line]) - 4 + 2
    assert (found["import_lines"], found["files"], found["median_lines"]) == (5, 4, 1)
    assert found["files_by_folder"] == {"(top level)": 2, "_runtime": 2, "_runtime/life": 1}
    assert found["zig"]["rings"] == {"functions": 2, "assertions": 2, "a_function": 1.0}  # type: ignore[index]
    assert (found["docs_words"], found["docs_words_without_essays"], found["decisions"]) == (7, 4, 1)
    assert found["modules_of_import"] == 2


def test_classes_meet_protocols_by_the_names_of_their_members(tree: Path) -> None:
    """A class that inherits from one that does is not a second implementation."""
    classes = tree_figures.read_classes(tree_figures.python_modules(tree))

    assert tree_figures.implementations(classes) == {
        "errors.py:Holder": ["errors.py:Base"],
        "errors.py:Wider": ["errors.py:Derived"],
    }


def test_tree_that_cannot_be_imported_has_no_count_of_modules(tree: Path) -> None:
    (tree / "src/trimesh/__init__.py").write_text("import nothing_of_that_name\n")

    assert tree_figures.imported_modules(tree) is None


@pytest.mark.slow
@pytest.mark.stress
def test_figures_of_this_tree_are_text() -> None:
    text = tree_figures.as_text(tree_figures.figures(tree_figures.ROOT))

    assert "_runtime/life" in text
    assert "functions" in text


def test_prose_is_counted(tmp_path: Path) -> None:
    package = tmp_path / "src" / "trimesh"
    package.mkdir(parents=True)
    (package / "calls.py").write_text(
        '"""What waits."""\n\n\ndef run():\n    """Return what is read, or what was."""\n'
    )
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "guide.md").write_text(f"{'word ' * 36}end.\n\n| {'word ' * 40} |\n\n{'word ' * 30}end.\n")
    for name in ("README.md", "CONTRIBUTING.md"):
        (tmp_path / name).write_text("# Title\n")
    git(tmp_path)

    found = {name: len(lines) for name, lines in prose_figures.findings(tmp_path, "HEAD~1").items()}

    assert list(found.values()) == [1, 1, 2, 1, 1]


def git(folder: Path) -> None:
    """Make a repository with two commits; the subject of the second is too long."""
    for command in (
        ["init", "-q"],
        ["commit", "--allow-empty", "-qm", "first"],
        ["commit", "--allow-empty", "-qm", "x" * 71],
    ):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
        subprocess.run(["git", *who, *command], cwd=folder, check=True)
