"""Style that no linter knows: sizes, leftovers, names, paths, doc comments; in Python and in Zig.

Each check is a function from (path, text) to complaints, so that it can be shown to complain (the `PLANTED` table).
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from pathlib import Path

import pytest
from tests.prose_figures import long_subjects
from tests.rows import rows

ROOT = Path(__file__).parents[1]

FUNCTION_LINES_MAX = 70
LINE_COLUMNS_MAX = 120

BANNED_NAMES = {"base2", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
LEFTOVER = re.compile(r"\b(FIXME|XXX|HACK)\b|\bTODO\b(?!\(#\d+\))")
PERSONS = re.compile(r"\b([Nn]o(body| one)|([Ss]ome|[Aa]ny|[Ee]very)(body|one))\b")
ABSOLUTE_PATH = re.compile(r"""(?<![\w.~/$}*-])/(home/(?!me/)|root/|Users/|work/|mnt/|srv/|tmp/)[\w.]""")
"""A user who is called "me" is nobody."""
SECOND_SPELLING = re.compile(r"\w\{'?\w+'?(=\d+|: ?\d+/\d+)")
"""Coordinates behind the name of a mesh in another spelling than `procs[gpus=2]`."""
LIST_ITEM = re.compile(r"([-*]|\d+\.) ")
TEXT_SUFFIXES = {".py", ".pyi", ".ipynb", ".zig", ".zon", ".h", ".c", ".md", ".toml", ".txt", ".cfg", ".sh", ""}
MADE_BY_HAND_FREE = {"LICENSE"}

Complaints = Iterator[str]
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> dict[str, str]:
    """Return path and text of every file of the project that people write."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        paths = [Path(line) for line in done.stdout.splitlines()]
    else:  # unpacked from an archive
        kept = ("src", "native", "tests", "examples", "bench", "docs", "tools")
        paths = [path.relative_to(ROOT) for folder in kept for path in (ROOT / folder).rglob("*")]
        paths = [path for path in paths if "__pycache__" not in path.parts]
    existing = (path for path in paths if (ROOT / path).is_file() and path.suffix in TEXT_SUFFIXES)
    return {str(path): (ROOT / path).read_text() for path in existing if path.name not in MADE_BY_HAND_FREE}


SOURCES = sources()
THIS = "tests/test_tidy.py"


@lru_cache(maxsize=1)
def parsed(text: str) -> ast.Module:
    """Return the tree of a file, which is made once for all checks of it."""
    return ast.parse(text)


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield a module and its statements, those in others, too. `ast.walk` yields ten times as many expressions."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            pending.extend(getattr(node, field, ()))


# ---- checks ----------------------------------------------------------------------------------------------------------


def function_size(path: str, text: str) -> Complaints:
    """A function, less its docstring, fits a screen."""
    measured = python_functions(text) if path.endswith(".py") else zig_functions(text) if path.endswith(".zig") else ()
    for name, line, lines in measured:
        if lines > FUNCTION_LINES_MAX:
            yield f"{path}:{line}: {name} has {lines} lines, at most {FUNCTION_LINES_MAX}"


def python_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, line and length less docstring and decorators of each function."""
    for node in statements(parsed(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            docstring = first.end_lineno - first.lineno + 1 if ast.get_docstring(node, clean=False) is not None else 0
            yield node.name, node.lineno, node.end_lineno - node.lineno + 1 - docstring


def zig_functions(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield name, line and length of each function of formatted Zig; a function that returns a type counts as none."""
    start = re.compile(r"^(\s*)(?:pub |export |inline |extern \"c\" |noinline )*fn (\w+)\(")
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = start.match(line)
        if found is None or line.rstrip().endswith(";"):
            continue
        closing = f"{found[1]}}}"
        end = next((n for n in range(number, len(lines)) if lines[n] == closing), number)
        head = next((n for n in range(number, end + 1) if lines[n].endswith("{")), number)
        if not re.search(r"\) type \{$", lines[head]):
            yield found[2], number + 1, end - number + 1


def line_width(path: str, text: str) -> Complaints:
    """Lines of Zig, C and the project's documents fit; Python is ruff's, and results stay as they were written."""
    if path.startswith("bench/results/"):
        return
    if path.endswith((".zig", ".c", ".h", ".md")):
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > LINE_COLUMNS_MAX and "](http" not in line and not line.startswith("|"):
                yield f"{path}:{number}: {len(line)} columns, at most {LINE_COLUMNS_MAX}"


def leftovers(path: str, text: str) -> Complaints:
    """A mark for later names its issue, or goes."""
    for number, line in enumerate(text.splitlines(), 1) if LEFTOVER.search(text) else ():
        if LEFTOVER.search(line):
            yield f"{path}:{number}: leftover mark: {line.strip()}"


def absolute_paths(path: str, text: str) -> Complaints:
    """Nothing depends on one machine's folders."""
    for number, line in enumerate(text.splitlines(), 1) if ABSOLUTE_PATH.search(text) else ():
        if ABSOLUTE_PATH.search(line):
            yield f"{path}:{number}: absolute path: {line.strip()}"


def markdown(path: str, text: str) -> Complaints:
    """A heading and a list stand apart, and a table has a line a row: else all become part of a paragraph."""
    if not path.endswith(".md"):
        return
    is_code, before = False, ""
    for number, line in enumerate(text.splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if not is_code:
            if re.match(r"#{1,6} ", line) and before.strip():
                yield f"{path}:{number}: a heading needs an empty line before it"
            if LIST_ITEM.match(line) and before.strip() and not (LIST_ITEM.match(before) or before[0] in " <#"):
                yield f"{path}:{number}: a list needs an empty line before it"
            if "|---" in line and not (line.startswith("|") and before.startswith("|")):
                yield f"{path}:{number}: the rule of a table stands below its head, on a line of its own"
        before = line


def subjects(path: str, text: str) -> Complaints:
    """A sentence about the code has a thing for its subject."""
    is_ours = path.startswith(("src/", "native/", "docs/", "examples/")) or "/" not in path
    for number, line in enumerate(text.splitlines(), 1) if is_ours and PERSONS.search(text) else ():
        if found := PERSONS.search(line):
            yield f"{path}:{number}: {found[0]!r}: name the thing (no task, a reader, the process that ...)"


def file_name(path: str, text: str) -> Complaints:
    """A file is named for the noun it defines."""
    del text
    for part in Path(path).with_suffix("").parts:
        if part.strip("_").lower() in BANNED_NAMES:
            yield f"{path}: the name {part!r} says nothing; name the noun that it defines"


def docstrings(path: str, text: str) -> Complaints:
    """Modules, classes, what users reach, and public functions of the native library have a summary sentence.

    Functions and methods of internals have one where it says more than their names.
    """
    if path.startswith("src/") and path.endswith(".py"):
        for name, line, summary, is_demanded in python_summaries(path, text):
            if summary is None and not is_demanded:
                continue
            if summary is None or not summary.endswith((".", "?", "!", ":")):
                yield f"{path}:{line}: {name} needs a docstring whose first line is one sentence"
    elif path.startswith("native/src/") and path.endswith(".zig"):
        lines = text.splitlines()
        for number, line in enumerate(lines):
            found = re.match(r"\s*pub (?:export |inline |extern \"c\" )*fn (\w+)\(", line)
            if found and not (number and re.match(r"\s*///", lines[number - 1])):
                yield f"{path}:{number + 1}: {found[1]} needs a doc comment (///)"
        if not text.startswith("//!"):
            yield f"{path}:1: needs a module comment (//!)"


def python_summaries(path: str, text: str) -> Iterator[tuple[str, int, str | None, bool]]:
    """Yield name, line, first docstring line, and whether one is demanded, of the module and its public definitions."""
    tree, reached = parsed(text), public_names().get(module_of(path), set())
    pending: list[tuple[str, ast.Module | Definition]] = [("", tree)]
    while pending:
        prefix, node = pending.pop()
        if not is_exempt(node):
            docstring = ast.get_docstring(node)
            is_demanded = isinstance(node, ast.Module | ast.ClassDef) or prefix.partition(".")[0] in reached
            summary = docstring and docstring.splitlines()[0]
            yield prefix or "the module", getattr(node, "lineno", 1), summary, is_demanded
        if isinstance(node, ast.Module | ast.ClassDef):
            children = [child for child in node.body if isinstance(child, Definition) and child.name[0] != "_"]
            pending.extend((f"{prefix}.{child.name}".lstrip("."), child) for child in children)


def module_of(path: str) -> str:
    """Return the dotted name of a file of the package."""
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def public_names() -> dict[str, set[str]]:
    """Return the names that users reach through the `__all__` of a public module, by the module that defines them."""
    files = (path for path in SOURCES if path.startswith("src/") and path.endswith(".py"))
    trees = {module_of(path): ast.parse(SOURCES[path]) for path in files}
    origins = {
        module: {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in statements(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for module, tree in trees.items()
    }
    found: dict[str, set[str]] = {}
    for door, tree in trees.items():
        if "._" in door:
            continue
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                for name in (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant)):
                    module, own = door, str(name)
                    while origins.get(module, {}).get(own, (module, own)) != (module, own):
                        module, own = origins[module][own]
                    found.setdefault(module, set()).add(own)
    return found


def is_exempt(node: ast.Module | Definition) -> bool:
    """Tell whether a definition says nothing new: an overload, an override, a setter."""
    decorators = {ast.unparse(decorator).rpartition(".")[2] for decorator in getattr(node, "decorator_list", [])}
    return bool(decorators & {"overload", "override", "setter"})


def coordinates(path: str, text: str) -> Complaints:
    """Texts name a member as `procs[gpus=2]`, by `place_name`, never by the repr of its point."""
    if not path.startswith(("src/", "docs/", "examples/")) or not path.endswith((".py", ".md")):
        return
    for number, line in enumerate(text.splitlines(), 1):
        if SECOND_SPELLING.search(line):
            yield f"{path}:{number}: name the member as procs[gpus=2]: {line.strip()}"
    if path.startswith("src/") and path.endswith(".py") and "point" in text:
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.FormattedValue) and shows_point(node):
                yield f"{path}:{node.lineno}: {{{ast.unparse(node.value)}}}: use place_name(mesh, point)"


def shows_point(node: ast.FormattedValue) -> bool:
    """Tell whether an f-string shows the repr of a point, or of the mapping that it is."""
    value, is_repr = node.value, node.conversion == ord("r")
    while isinstance(value, ast.Call) and ast.unparse(value.func) in ("dict", "repr", "str") and value.args:
        is_repr = True
        value = value.args[0]
    value = value.values[0] if isinstance(value, ast.BoolOp) else value
    value = value.func if isinstance(value, ast.Call) else value
    if isinstance(value, ast.Attribute):
        return value.attr in ("point", "_point")
    return is_repr and isinstance(value, ast.Name) and value.id == "point"


CHECKS: list[Callable[[str, str], Complaints]] = [
    function_size,
    line_width,
    leftovers,
    absolute_paths,
    markdown,
    subjects,
    file_name,
    docstrings,
    coordinates,
]

LONG_BODY = "    x = 1\n" * FUNCTION_LINES_MAX

PLANTED = [
    (function_size, "src/a.py", f"def f():\n{LONG_BODY}"),
    (function_size, "native/src/a.zig", f"pub fn f() void {{\n{LONG_BODY}}}\n"),
    (line_width, "native/src/a.zig", "x" * (LINE_COLUMNS_MAX + 1)),
    (leftovers, "src/a.py", "# TO" + "DO: later\n"),
    (leftovers, "native/src/a.zig", "// FIX" + "ME\n"),
    (absolute_paths, "src/a.py", 'open("/ho' + 'me/you/file")\n'),
    (markdown, "docs/a.md", "A paragraph.\n## A heading\n"),
    (markdown, "docs/a.md", "A paragraph:\n- an item\n"),
    (markdown, "docs/a.md", "| a | b | |---|---| | 1 | 2 |\n"),
    (subjects, "src/a.py", "x = 1  # no" + "body changes it\n"),
    (subjects, "docs/a.md", "Some" + "one waits.\n"),
    (file_name, "src/trimesh/utils.py", ""),
    (docstrings, "src/trimesh/actor/host_mesh.py", '"""A module."""\ndef this_host(): ...\n'),
    (docstrings, "src/a.py", '"""A module."""\nclass C: ...\n'),
    (
        docstrings,
        "src/a.py",
        '"""A module."""\nclass C:\n    """A class."""\n    def f(self):\n        """no sentence"""\n',
    ),
    (docstrings, "native/src/a.zig", "//! A module.\npub fn f() void {}\n"),
    (docstrings, "native/src/a.zig", "const x = 1;\n"),
    (coordinates, "src/a.py", 'f"{mesh}{point!r}"\n'),
    (coordinates, "src/a.py", 'f"{mesh}{where.point}"\n'),
    (coordinates, "src/a.py", 'f"{mesh}{whole.point(rank)!r}"\n'),
    (coordinates, "src/a.py", 'f"{mesh}{dict(where.point or {})}"\n'),
    (coordinates, "docs/a.md", "it comes from procs{'gpus': 2" + "/4}\n"),
    (coordinates, "docs/a.md", "it comes from procs{gpus=" + "2}\n"),
]


@pytest.mark.slow
def test_tidy() -> None:
    complaints = [
        line for path, text in SOURCES.items() if path != THIS for check in CHECKS for line in check(path, text)
    ]

    assert not complaints, "\n" + "\n".join(complaints)


@rows(("check", "path", "text"), PLANTED)
def test_tidy_complains(check: Callable[[str, str], Complaints], path: str, text: str) -> None:
    assert len(list(check(path, text))) == 1


@rows(
    ("check", "path", "text"),
    [
        (function_size, "src/a.py", f'def f():\n    """Do.\n\n{LONG_BODY}    """\n{LONG_BODY[: -len("    x = 1")]}\n'),
        (function_size, "native/src/a.zig", f"pub fn F(comptime T: type) type {{\n{LONG_BODY}}}\n"),
        (leftovers, "src/a.py", "# TO" + "DO(#12): name what is left\n"),
        (subjects, "src/a.py", "# no task changes any one of them\n"),
        (markdown, "docs/a.md", "# A heading\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```sh\nrun\n# a comment\n```\n"),
        (absolute_paths, "src/a.py", "url = 'https://example.org/home/page'\n"),
        (docstrings, "src/a.py", '"""A module."""\ndef f(): ...\n'),
        (docstrings, "native/src/a.zig", "//! A module.\n\n/// Does it.\npub fn f() void {}\n"),
        (coordinates, "src/a.py", "f\"{place_name(mesh, point)} of {dict(extent)!r}, {point['gpus']}\"\n"),
        (coordinates, "docs/a.md", "a point is {'gpus': 2" + "/4}, a mesh procs{'gpus': 4}\n"),
    ],
)
def test_tidy_keeps_quiet(check: Callable[[str, str], Complaints], path: str, text: str) -> None:
    assert list(check(path, text)) == []


def test_tidy_sees_the_tree() -> None:
    assert "src/trimesh/errors.py" in SOURCES
    assert any(path.endswith(".zig") for path in SOURCES)
    assert "origin" in public_names()["trimesh.errors"]


INVARIANT = re.compile(r"\b([A-Z]{2})-\d+:? [A-Za-z`]")


def test_invariants_of_two_files_have_two_prefixes() -> None:
    """`XX-1` at the head of a file says what holds there; elsewhere, in parentheses, it is a citation."""
    files: dict[str, set[str]] = {}
    for path, text in SOURCES.items():
        if path.startswith(("src/", "native/src/")) and path.endswith((".py", ".zig")):
            head = text.partition('"""')[2].partition('"""')[0] if path.endswith(".py") else text.partition("\n\n")[0]
            lines = (line.lstrip("/! ") for line in head.splitlines())
            for prefix in INVARIANT.findall(" ".join(lines)):
                files.setdefault(prefix, set()).add(path)

    assert len(files) > 30
    assert {prefix: paths for prefix, paths in files.items() if len(paths) > 1} == {}


# ---- one name, one thing ---------------------------------------------------------------------------------------------

FACES = {
    *("Actor", "ActorMesh", "Body", "Crossing", "Endpoint", "EventStream", "HostMesh", "InterruptGuard", "ProcMesh"),
    *("Pool", "PoolSession", "Port", "QuietTimeLimit", "RDMABuffer", "Receiver", "ReplayBuffer", "Slots", "Spawning"),
    *("Store", "TimeLimit"),
}
"""Classes of `trimesh.aio` and `trimesh.blocking` that mirror one of the same name below, on purpose."""

MESSAGES = {"Fired", "Published", "Taken"}
"""Messages, which are named with their module (`messages.Fired`), beside what they tell of. There may only be fewer."""


PUBLIC_CLASS = re.compile(r"^class (?!_)(\w+)", re.MULTILINE)


def test_public_classes_of_two_modules_have_two_names() -> None:
    """What a leading underscore keeps in its module is met in no other."""
    modules: dict[str, list[str]] = {}
    for path, text in SOURCES.items():
        if path.startswith("src/trimesh/") and path.endswith(".py"):
            for name in PUBLIC_CLASS.findall(text):
                modules.setdefault(name, []).append(path)

    assert {name for name, paths in modules.items() if len(paths) > 1} == FACES | MESSAGES


def test_every_exception_is_explained() -> None:
    """What it means, when it happens, what to do; `tests/test_site.py` has those of other packages."""
    page = (ROOT / "docs/reference/exceptions.md").read_text()
    classes = [node.name for node in ast.parse(SOURCES["src/trimesh/errors.py"]).body if isinstance(node, ast.ClassDef)]

    missing = [name for name in classes if name != "Origin" and f"### {name}\n" not in page]
    assert not missing, f"docs/reference/exceptions.md needs a part for each of {missing}"


RULED_SINCE = "d48bec60"
"""Commits after this one have short subjects."""


def test_commit_subjects_are_short() -> None:
    try:
        found = long_subjects(ROOT, RULED_SINCE)
    except subprocess.CalledProcessError:
        pytest.skip(f"the history here does not reach {RULED_SINCE}")
    assert found == []
