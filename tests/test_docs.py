"""What the documents say is so: listings run, files and links exist."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.program_template import Run, executed
from tests.rows import rows
from tests.runtime import fake_nvml
from website import reference

from trimesh.testing import why_no_networks

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"]
DOCUMENTS += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
DOCUMENTS += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "bench").rglob("*.md"))]
DOCUMENTS += [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob("*.md"))]
SOURCE_FOLDERS = ["", "src/trimesh", "native/src"]


def read(document: str) -> str:
    return (ROOT / document).read_text()


@pytest.mark.daily
@pytest.mark.real
@pytest.mark.torch
def test_readme_listings_run(run_program: Run, tmp_path: Path) -> None:
    """The first prints what the page shows; of the others, one is a test and the rest are programs."""
    shown = read("README.md").partition("It prints\n\n")[2].partition("\n\n")[0].replace("    ", "") + "\n"
    first, *others = listings("README.md")
    program = tmp_path / "listing.py"
    program.write_text(first)
    done = run_program(program, cwd=tmp_path, seconds=LISTING_SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, shown, "")
    for text in others:
        if "@simulate" in text:
            (tmp_path / "test_listing.py").write_text(text)
            options = ["-q", "-p", "no:cacheprovider", "-p", "trimesh.testing.plugin", "--mesh-seeds", "1"]
            assert subprocess.run([sys.executable, "-m", "pytest", *options, tmp_path], check=False).returncode == 0
        else:
            program.write_text(text)
            assert run_program(program, cwd=tmp_path, seconds=LISTING_SECONDS).returncode == 0, text


def test_index_of_essays_names_each_once() -> None:
    named = re.findall(r"^- \[[\w-]+\]\(([\w-]+)\.md\): ", read("docs/design/index.md"), re.MULTILINE)
    there = [path.stem for path in (ROOT / "docs" / "design").glob("*.md") if path.stem != "index"]
    assert sorted(named) == sorted(there)


def listings(document: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", read(document), re.DOTALL)


LOGGED = re.compile(r"\w+: \w+: .* \(at .*\); (the mesh goes on without it|restarting rank \d+ after \S+ s)")
"""What `trimesh` logs of a failure that a policy keeps from being raised."""


def numbered(*documents: str) -> list[tuple[str, int]]:
    return [(document, index) for document in documents for index in range(len(listings(document)))]


LISTING_SECONDS = 100.0


def said_by(run: Run, document: str, index: int, folder: Path) -> list[str]:
    """Run a listing as a program, which must end well; return what it said on stderr."""
    program = folder / "listing.py"
    program.write_text(listings(document)[index])
    done = run(program, cwd=folder, seconds=LISTING_SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


@pytest.mark.real
@pytest.mark.parametrize(("document", "index"), numbered("docs/supervision.md", "docs/rdma.md", "docs/services.md"))
def test_listing_runs(document: str, index: int, run_program: Run, tmp_path: Path) -> None:
    said = said_by(run_program, document, index, tmp_path)
    if document == "docs/supervision.md":  # its meshes go on after failures, each of which is logged
        said = [line for line in said if not LOGGED.fullmatch(line)]
    assert said == []


@pytest.mark.real
def test_listing_of_places_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one program of docs/hosts.md, on hosts that show four GPUs each: its agents take the environment."""
    fake_nvml.install(monkeypatch, 4)
    [index] = [index for index, text in enumerate(listings("docs/hosts.md")) if "trio.run(main)" in text]
    assert said_by(executed, "docs/hosts.md", index, tmp_path) == []


@pytest.mark.real
@pytest.mark.torch
@pytest.mark.parametrize(("document", "index"), [*numbered("docs/tensors.md"), *numbered("docs/data.md")])
def test_listing_with_torch_runs(document: str, index: int, run_program: Run, tmp_path: Path) -> None:
    assert said_by(run_program, document, index, tmp_path) == []


@pytest.mark.real
def test_testing_listings_run(tmp_path: Path) -> None:
    """All listings of docs/testing.md, as one suite, with one seed."""
    found = listings("docs/testing.md")
    suite = tmp_path / "test_listings.py"
    suite.write_text("\n\n".join(found))
    options = ["-q", "-p", "no:cacheprovider", "-p", "trimesh.testing.plugin", "-c", "/dev/null"]
    options += ["--mesh-first-seed", "2", "--mesh-seeds", "1"]  # it finds what is wrong in the one that is

    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(suite)],
        capture_output=True,
        text=True,
        check=False,
    )

    # Two of them run on two back ends, one on hosts in networks, too; one is wrong, and fails as the document shows.
    more = 1 + (why_no_networks() is None)
    assert f"1 failed, {len(found) + more} passed" in done.stdout, done.stdout
    shown = re.search(r"(?m)^    not linearizable: .*\n(    .*\n)*?    replay: ", read("docs/testing.md"))
    assert shown is not None
    assert [line for line in shown[0].splitlines()[:-1] if line.strip() not in done.stdout] == []


@rows("document", DOCUMENTS)
def test_document_links_lead_somewhere(document: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", read(document))

    local = [(ROOT / document).parent.joinpath(link).resolve() for link in links if "://" not in link]
    assert [path for path in local if path not in made_pages() and not path.exists()] == []
    headings = {link for link in re.findall(r"\]\(([^):]*#[^)]+)\)", read(document)) if not has_heading(document, link)}
    assert headings == set()


@functools.cache
def made_pages() -> dict[Path, str]:
    """Return path and text of the pages that are made while the site is built."""
    return {ROOT / "docs" / page: text for page, text in reference.pages().items()}


def has_heading(document: str, link: str) -> bool:
    """Tell whether a link into a document of ours leads to a heading, or an anchor, of it."""
    path, _, anchor = link.partition("#")
    place = ((ROOT / document).parent / path).resolve() if path else ROOT / document
    text = made_pages().get(place) or place.read_text()
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
    return anchor in slugs | set(re.findall(r'<a id="(\w+)"', text))


def test_architecture_and_essays_name_existing_files() -> None:
    pages = [ROOT / "docs" / "ARCHITECTURE.md", *(ROOT / "docs" / "design").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"`([\w/]+\.(?:py|zig|h|toml))`", page.read_text())}

    assert len(named) > 20
    assert {name for name in named if not any((ROOT / folder / name).exists() for folder in SOURCE_FOLDERS)} == set()


def test_contributing_names_existing_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", read("CONTRIBUTING.md") + read("README.md")))

    assert {"test", "check"} <= named <= targets


def test_promises_of_security_name_tests_that_exist() -> None:
    """Each paragraph that promises something links files of tests, which have the functions that it names."""
    promised = read("SECURITY.md").partition("## What is promised")[2].partition("## What is not promised")[0]
    for paragraph in promised.strip().split("\n\n"):
        links = re.findall(r"\[([\w/.]*)(?:::(\w+))?\]\(([^)]+)\)", paragraph)
        assert links, paragraph
        for _, function, path in links:
            assert not function or f"def {function}(" in read(path), (path, function)
