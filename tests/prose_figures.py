"""Figures of the prose of a tree: openings of docstrings, clauses for nouns, long sentences, commit subjects.

    python -m tests.prose_figures [--root PATH] [--since COMMIT] [--list]

A thermometer, no lint: a text that passes may still have to be read twice. `--list` prints each finding.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.tree_figures import ROOT, Definition, python_modules

OPENING = re.compile(r"(?:What|Who|Whose|How|Whether|Where|Of|Its|That|Be|None|There)\b")
"""First words of a docstring that is a clause, where a noun of the field or a verb belongs."""
CLAUSE = re.compile(r"\bwhat (?:is|was|has|came|are|were)\b", re.IGNORECASE)
LISTING = re.compile(r"```.*?```", re.DOTALL)
SENTENCE_WORDS_MAX = 35
SUBJECT_CHARS_MAX = 70


def docstrings(root: Path) -> Iterator[tuple[str, bool, str]]:
    """Yield place, whether it is a module's, and text of each docstring, of attributes too."""
    for module in python_modules(root):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Module | Definition) and (text := ast.get_docstring(node)):
                line = 1 if isinstance(node, ast.Module) else node.lineno
                yield f"src/trimesh/{module.path}:{line}", isinstance(node, ast.Module), text


def pages(root: Path) -> list[Path]:
    return sorted([*(root / "docs").rglob("*.md"), root / "README.md", root / "CONTRIBUTING.md"])


def clauses(root: Path) -> Iterator[str]:
    """Yield the lines of sources and pages in which a clause stands for a noun: "what is read"."""
    texts = [(f"src/trimesh/{module.path}", module.text) for module in python_modules(root)]
    texts += [(str(path.relative_to(root)), path.read_text()) for path in pages(root)]
    for path, text in texts:
        for number, line in enumerate(text.splitlines(), 1):
            yield from (f"{path}:{number}: {line.strip()}" for _ in CLAUSE.findall(line))


def long_sentences(root: Path) -> Iterator[str]:
    for path in pages(root):
        prose = re.sub(r"^(?:    .*|\|.*|#.*|<.*)$", "", LISTING.sub("", path.read_text()), flags=re.MULTILINE)
        for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", prose):
            for sentence in re.split(r"(?<=[.:;?!])\s+", paragraph):
                words = len(sentence.split())
                if words > SENTENCE_WORDS_MAX:
                    yield f"{path.relative_to(root)}: {words} words: {' '.join(sentence.split())}"


def long_subjects(root: Path, since: str) -> list[str]:
    """Return subjects of commits that are too long."""
    command = ["git", "log", "--format=%s", f"{since}..HEAD"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if len(line) > SUBJECT_CHARS_MAX]


def findings(root: Path, since: str) -> dict[str, list[str]]:
    """Return each finding by what it is."""
    texts = list(docstrings(root))
    opened = [
        (is_module, f"{place}: {text.splitlines()[0]}") for place, is_module, text in texts if OPENING.match(text)
    ]
    return {
        "module docstrings that open with a clause": [line for is_module, line in opened if is_module],
        "docstrings that open with a clause": [line for _, line in opened],
        "clauses that stand for a noun": list(clauses(root)),
        f"sentences of pages over {SENTENCE_WORDS_MAX} words": list(long_sentences(root)),
        f"commit subjects over {SUBJECT_CHARS_MAX} characters": long_subjects(root, since),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.prose_figures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout than this one")
    parser.add_argument("--since", default="HEAD~20", help="the commit after which subjects are looked at")
    parser.add_argument("--list", action="store_true", help="print each finding")
    chosen = parser.parse_args()
    for name, found in findings(chosen.root.resolve(), chosen.since).items():
        print(f"{name:<48}{len(found):>8,}")
        if chosen.list:
            print("".join(f"  {line}\n" for line in found))


if __name__ == "__main__":
    main()
