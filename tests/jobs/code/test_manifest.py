"""What describes a tree of code, and what is refused in it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rows import rows

from trimesh.errors import ProtocolError
from trimesh.jobs.code.scanning import CodeFile, Manifest, decoded, digest_of, is_inside

DIGEST = digest_of(b"text")
GOOD = CodeFile("src/a.py", DIGEST, 4)


def refused(*files: CodeFile, import_paths: tuple[str, ...] = ()) -> str:
    with pytest.raises(ProtocolError) as caught:
        decoded(msgspec.msgpack.encode(Manifest(files, import_paths)))
    return str(caught.value)


def test_manifest_is_the_same_in_whatever_order_files_were_found() -> None:
    """MF-1: and another one for each other name, content, permission and link."""
    other = CodeFile("src/b.py", DIGEST, 4)
    whole = Manifest.of([GOOD, other], ["src"])
    assert Manifest.of([other, GOOD], ["src"]).encoded() == whole.encoded()
    assert decoded(whole.encoded()) == whole
    assert whole.size == 8
    changed = [
        Manifest.of([GOOD], ["src"]),
        Manifest.of([GOOD, other], [""]),
        Manifest.of([GOOD, CodeFile("src/c.py", DIGEST, 4)], ["src"]),
        Manifest.of([GOOD, CodeFile("src/b.py", digest_of(b"else"), 4)], ["src"]),
        Manifest.of([GOOD, CodeFile("src/b.py", DIGEST, 4, is_executable=True)], ["src"]),
        Manifest.of([GOOD, CodeFile("src/b.py", b"", 0, target="a.py")], ["src"]),
    ]
    assert len({one.encoded() for one in (whole, *changed)}) == len(changed) + 1


@rows("name", ["", "/etc/passwd", "../a", "a/../../b", "a//b", "a/./b", "a\0b", "a/", "."])
def test_names_that_lead_out_of_the_tree_are_refused(name: str) -> None:
    """MF-2."""
    assert not is_inside(name)
    assert "its own path inside the tree" in refused(CodeFile(name, DIGEST, 4))
    if name:
        assert "in the tree" in refused(GOOD, import_paths=(name,))


def test_files_below_a_link_or_of_one_name_are_refused() -> None:
    """MF-2: a link may lead anywhere, so nothing is written through one."""
    link = CodeFile("out", b"", 0, target="/etc")
    assert "its own path inside the tree" in refused(link, CodeFile("out/passwd", DIGEST, 4))
    assert "its own path inside the tree" in refused(GOOD, GOOD)
    assert "digest" in refused(CodeFile("a", b"short", 4))
    assert "digest" in refused(CodeFile("a", DIGEST, 4, target="b"))


@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    try:
        decoded(data)
    except ProtocolError:
        return
    assert msgspec.msgpack.decode(data, type=Manifest) == decoded(data)
