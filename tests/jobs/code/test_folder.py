"""The folder of contents and trees of a host."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from trimesh.jobs.code.folder import CodeFolder
from trimesh.jobs.code.scanning import CodeFile, Manifest, digest_of


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[CodeFolder]:
    """An empty one."""
    with closing(CodeFolder(tmp_path / "code")) as found:
        yield found


def put(folder: CodeFolder, data: bytes) -> bytes:
    draft = folder.draft()
    draft.write(data[:2])
    draft.write(data[2:])
    folder.add(draft)
    assert draft.digest == digest_of(data)
    return draft.digest


def manifest(*texts: bytes) -> Manifest:
    return Manifest.of((CodeFile(f"pkg/{text.decode()}.py", digest_of(text), len(text)) for text in texts), ["pkg"])


def test_tree_has_the_files_of_its_manifest(folder: CodeFolder) -> None:
    """CF-1: made once, and whole."""
    put(folder, b"text")
    put(folder, b"run")
    files = [
        CodeFile("a/b/c.py", digest_of(b"text"), 4),
        CodeFile("again.py", digest_of(b"text"), 4),
        CodeFile("run.sh", digest_of(b"run"), 3, is_executable=True),
        CodeFile("link", b"", 0, target="a/b"),
    ]
    tree = folder.tree(Manifest.of(files, [""]))
    assert (tree / "link" / "c.py").read_bytes() == (tree / "again.py").read_bytes() == b"text"
    assert os.access(tree / "run.sh", os.X_OK)
    assert os.readlink(tree / "link") == "a/b"
    assert folder.tree(Manifest.of(files, [""])) == tree
    with pytest.raises(FileNotFoundError):
        folder.tree(manifest(b"text", b"absent"))
    assert [one.name for one in tree.parent.iterdir()] == [tree.name]


def test_content_that_was_written_to_is_missing(folder: CodeFolder) -> None:
    """CF-2: a tree's files are those of all trees, and who may write to all files may write to them."""
    put(folder, b"text")
    tree = folder.tree(manifest(b"text"))
    assert folder.missing(manifest(b"text").files) == []
    place = tree / "pkg" / "text.py"
    place.chmod(0o600)
    place.write_bytes(b"TEXT")
    assert folder.missing(manifest(b"text").files) == [digest_of(b"text")]
    put(folder, b"text")
    assert folder.tree(manifest(b"text")) == tree
    assert place.read_bytes() == b"text"
    place.unlink()
    place.parent.rmdir()
    folder.tree(manifest(b"text"))
    assert place.read_bytes() == b"text"


def test_what_is_in_no_use_is_removed(folder: CodeFolder) -> None:
    """CF-3: trees by the time when they were used, contents with the last of their trees, drafts of who has died."""
    for text in (b"old", b"both", b"new", b"none"):
        put(folder, text)
    old, new = folder.tree(manifest(b"old", b"both")), folder.tree(manifest(b"new", b"both"))
    (new.parent.parent / "contents" / "draft-0").touch()
    os.utime(old, (1, 1))
    folder.prune(3_600.0)
    assert not old.exists()
    assert new.exists()
    assert folder.missing(manifest(b"old", b"both", b"new", b"none").files) == []  # they have just left their tree
    folder.prune(-3_600.0)
    assert folder.missing(manifest(b"old", b"both").files) == [digest_of(b"both"), digest_of(b"old")]
    assert sum(len(names) for _, _, names in os.walk(new.parent.parent)) == 1, "the lock"


def test_nothing_is_removed_while_another_process_adds(folder: CodeFolder, tmp_path: Path) -> None:
    """CF-3."""
    with closing(CodeFolder(tmp_path / "code")) as other:
        assert folder.name == other.name
        assert folder.lock_shared()
        assert other.lock_shared()
        assert not other.lock_alone()
        folder.unlock()
        assert other.lock_alone()
        assert not folder.lock_shared()
        other.unlock()
        assert folder.lock_shared()


def test_folder_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code").chmod(0o777)
    with pytest.raises(PermissionError, match="no other may write"):
        CodeFolder(tmp_path / "code")
