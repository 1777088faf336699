"""Pages of the site that are made from the sources have everything; links are found out when they lead nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from tests.rows import rows
from website import check, menu, outside, pictures, reference

import trimesh
from trimesh import events, limits


def test_every_public_name_has_one_place_in_the_reference() -> None:
    pages = reference.names_by_page()

    placed = [name for names in pages.values() for name in names]
    assert len(placed) == len(set(placed))
    shown = {name.rpartition(".")[2] for name in placed} | set(pages)
    assert set(trimesh.__all__) - shown == set()
    for package in ("aio", "blocking", "rdma", "service", "spmd", "testing"):
        assert set(pages[package]) >= {f"trimesh.{package}.{name}" for name in getattr(trimesh, package).__all__}


def test_every_limit_is_in_the_table_with_its_meaning() -> None:
    rows = [row.split(" | ") for row in reference.limits_page().splitlines() if row.startswith("| `")]

    assert {row[0].strip("|` ") for row in rows} == {name for name in vars(limits) if name.isupper() and name[0] != "_"}
    assert [row for row in rows if len(row) != 3 or len(row[2]) < 12] == []


def test_every_exception_is_explained() -> None:
    """What it means, and what to do; the one that only torch brings is listed by hand."""
    page = (outside.ROOT / "docs/reference/exceptions.md").read_text()
    parts = {part.partition("\n")[0]: part for part in page.split("\n### ")[1:]}
    parts = {name: text.partition("\n## ")[0] for name, text in parts.items()}

    modules = [
        trimesh.errors,
        *(getattr(trimesh, name) for name in ("aio", "blocking", "rdma", "service", "spmd", "testing")),
    ]
    things = {name: getattr(module, name) for module in modules for name in getattr(module, "__all__", vars(module))}
    raised = {name for name, thing in things.items() if isinstance(thing, type) and issubclass(thing, BaseException)}
    assert set(parts) == raised | {"RecordingError"}
    assert {name for name, text in parts.items() if "\n\n**" in text or "**Do:**" not in text} == set()


def test_every_event_is_in_the_table() -> None:
    rows = [row for row in reference.events_page().splitlines() if row.startswith("| `")]

    assert {row.split("`")[1] for row in rows} == {record.__name__ for record in get_args(events.Event)}


@rows(
    ("page", "written", "shown"),
    [
        ("guide.md", "[rules](SEMANTICS.md#C2)", "[rules](SEMANTICS.md#C2)"),
        ("guide.md", "[program](../examples/ray/async_actor.py)", "[program](examples/ray/async_actor.md)"),
        ("how-to/jobs.md", "[limits](../reference/limits.md)", "[limits](../reference/limits.md)"),
        ("how-to/jobs.md", "[security](../../SECURITY.md)", "[security](../explanation/security.md)"),
        ("explanation/security.md", "[test_site.py::test_b](tests/test_site.py)", "test_site.py::test_b"),
        ("reference/api/config.md", "[settings](docs/settings.md)", "[settings](../../settings.md)"),
        ("guide.md", "[limits](../src/trimesh/limits.py)", "[limits](reference/limits.md)"),
        ("reference/exceptions.md", "[e](../../src/trimesh/errors.py#x)", "[e](api/errors.md#x)"),
        ("guide.md", "[none](none.md)", "[none](none.md)"),
        ("guide.md", "[Trio](https://trio.readthedocs.io)", "[Trio](https://trio.readthedocs.io)"),
        ("guide.md", "```\n[a](b.md)\n```", "```\n[a](b.md)\n```"),
    ],
)
def test_links_between_files_lead_to_pages(page: str, written: str, shown: str) -> None:
    assert outside.rewritten(written, page, frozenset({"reference/limits.md", "reference/events.md"})) == shown


def test_links_of_documents_lead_to_files_of_the_repository() -> None:
    """They are read there, too, where pages that are made while the site is built do not exist."""
    root = outside.ROOT
    dead = list[tuple[str, str]]()
    for page in sorted({*(root / outside.DOCS).rglob("*.md"), root / "README.md", root / "CONTRIBUTING.md"}):
        text = outside.FENCE.sub("", page.read_text())
        for match in outside.LINK.finditer(text):
            target = match["target"].partition("#")[0]
            if target and "://" not in target and not (page.parent / target).exists():
                dead.append((page.relative_to(root).as_posix(), target))
    assert dead == []


def test_menu_has_every_page() -> None:
    parts = ("Tutorial", "How-to", "Reference", "Explanation")

    shown = set(menu.named(menu.completed([{"Home": "index.md"}, *({part: []} for part in parts)])))

    docs = outside.ROOT / outside.DOCS
    assert shown >= {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert shown >= {page for page in outside.pages().values() if page.startswith("examples/")}


def test_check_finds_what_is_wrong_with_a_site(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#far">B</a><a href="b.html#near">B</a><a href="c.html">C</a>'
        '<script src="https://example.com/x.js"></script><a href="https://example.com">far</a>'
        '<a href="search/">S</a><img src="b.html">'
    )
    (tmp_path / "b.html").write_text('<h1 id="near">B</h1><a href="a.html#top">A</a>')

    assert "no search where it is opened as a file" in next(check.complaints(tmp_path))
    (tmp_path / "search").mkdir()
    (tmp_path / "search/search_index.js").write_text("var __index = {}")
    (tmp_path / "search/search_index.json").write_text('{"docs": [{"location": "b.html"}, {"location": "d.html"}]}')
    assert sorted(check.complaints(tmp_path)) == [
        "a.html: b.html needs a text in place of the picture",
        "a.html: fetches https://example.com/x.js",
        "a.html: leads to b.html#far, where no such anchor is",
        "a.html: leads to c.html, which is not there",
        "a.html: leads to search/, which is not there",
        "the search: leads to d.html, which is not there",
    ]


PICTURE_BYTES_MAX = 15_000


def test_pictures_are_those_of_their_texts() -> None:
    texts, drawn = sorted(pictures.FOLDER.glob("*.txt")), sorted(pictures.FOLDER.glob("*.svg"))

    assert [path.stem for path in texts] == [path.stem for path in drawn]
    stale = [path.name for path in texts if path.with_suffix(".svg").read_text() != pictures.drawn(path.read_text())]
    assert stale == [], "run `python -m website.pictures`"
    assert [path.name for path in drawn if path.stat().st_size > PICTURE_BYTES_MAX] == []
    assert [path.name for path in drawn if "></title>" in path.read_text()] == []


def test_picture_refuses_words_that_do_not_fit() -> None:
    assert 'class="in middle">fits</text>' in pictures.drawn("title A box\nbox a 0 0 10 4: fits\n")
    with pytest.raises(ValueError, match="widen the box"):
        pictures.drawn("title A box\nbox a 0 0 10 4: words that are too long\n")
