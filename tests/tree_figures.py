"""Figures of a source tree: size, files, protocols, imports, modules of `import trimesh`, Zig assertions, documents.

    python -m tests.tree_figures [--root PATH] [--json] [--protocols] [--items]

They are read from the sources, without importing them, except for the count of modules. `--protocols` lists each
protocol with the classes that meet it; `--items` also lets pytest collect the tests, which takes half a minute.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).resolve().parents[1]

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


# ---- Python ----------------------------------------------------------------------------------------------------------


@frozen
class Module:
    """One file of the package."""

    path: str
    """Relative to `src/trimesh`."""
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


def python_modules(root: Path) -> list[Module]:
    package = root / "src" / "trimesh"
    paths = listed(root, "src/trimesh", "*.py") or sorted(package.rglob("*.py"))
    return [Module(str(path.relative_to(package)), path.read_text()) for path in paths]


def listed(root: Path, folder: str, pattern: str) -> list[Path]:
    """Return the files that git knows or would add, so that what a build makes is left out; empty without git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", folder]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    paths = [root / line for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return sorted({path for path in paths if path.match(pattern) and path.is_file()})


def span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of all strings that stand as statements: docstrings, of attributes too."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in span(node)
    }


def code_lines(module: Module) -> set[int]:
    """Return the lines that have code: no blank line, no comment, no docstring."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in LAYOUT:
            found.update(range(token.start[0], token.end[0] + 1))
    return found - docstring_lines(module.tree)


def import_lines(module: Module) -> set[int]:
    nodes = (node for node in ast.walk(module.tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return {line for node in nodes for line in span(node)}


def folder_of(path: str, depth: int) -> str:
    parts = Path(path).parts[:-1]
    return "/".join(parts[:depth])


def files_by_folder(modules: list[Module]) -> dict[str, int]:
    """Count the files of each package, and of each room of `_runtime`."""
    packages = Counter(folder_of(module.path, 1) or "(top level)" for module in modules)
    rooms = Counter(folder_of(module.path, 2) for module in modules if module.path.count("/") > 1)
    return {**packages, **{name: count for name, count in rooms.items() if name.startswith("_runtime/")}}


# ---- protocols -------------------------------------------------------------------------------------------------------


@frozen
class Class:
    """What the sources say of a class."""

    name: str
    bases: tuple[str, ...]
    members: frozenset[str]
    """Its methods and attributes, those that methods assign to `self` too."""

    @property
    def is_protocol(self) -> bool:
        return "Protocol" in self.bases


def last_name(node: ast.expr) -> str:
    node = node.value if isinstance(node, ast.Subscript) else node
    return node.attr if isinstance(node, ast.Attribute) else ast.unparse(node)


def target_names(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        targets = [node.target]
    else:
        targets = []
    for target in targets:
        yield from target.elts if isinstance(target, ast.Tuple | ast.List) else [target]


def read_class(node: ast.ClassDef) -> Class:
    members = {child.name for child in node.body if isinstance(child, Definition)}
    members |= {name.id for child in node.body for name in target_names(child) if isinstance(name, ast.Name)}
    for inner in ast.walk(node):
        for target in target_names(inner):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                members.add(target.attr)
    return Class(node.name, tuple(last_name(base) for base in node.bases), frozenset(members))


def read_classes(modules: list[Module]) -> dict[str, Class]:
    """Return the classes by "path:name"."""
    return {
        f"{module.path}:{node.name}": read_class(node)
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }


NOT_REQUIRED = {"__slots__", "__module__", "__doc__"}


def implementations(classes: dict[str, Class]) -> dict[str, list[str]]:
    """Return which classes have all members of each protocol, by their names alone. Of a family, its base counts."""
    by_name = {one.name: one for one in classes.values()}

    def all_members(one: Class, seen: frozenset[str] = frozenset()) -> frozenset[str]:
        above = [by_name[base] for base in one.bases if base in by_name and base not in seen]
        return one.members.union(*(all_members(base, seen | {one.name}) for base in above))

    def ancestors(one: Class, seen: frozenset[str] = frozenset()) -> frozenset[str]:
        above = [by_name[base] for base in one.bases if base in by_name and base not in seen]
        return frozenset(base.name for base in above).union(*(ancestors(base, seen | {one.name}) for base in above))

    found: dict[str, list[str]] = {}
    for where, protocol in classes.items():
        if protocol.is_protocol:
            required = all_members(protocol) - NOT_REQUIRED
            meets = {
                place: one
                for place, one in classes.items()
                if not one.is_protocol and (required <= all_members(one) or protocol.name in ancestors(one))
            }
            names = {one.name for one in meets.values()}
            found[where] = sorted(place for place, one in meets.items() if not ancestors(one) & names)
    return found


# ---- import ----------------------------------------------------------------------------------------------------------

PROBE = """
import json, sys
import trimesh
print(json.dumps(sum(name.partition(".")[0] == "trimesh" for name in sys.modules)))
"""


def imported_modules(root: Path) -> int | None:
    """Count the modules of the package that `import trimesh` loads; None where it cannot be imported."""
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else None


# ---- Zig -------------------------------------------------------------------------------------------------------------

ZIG_FUNCTION = re.compile(r"^\s*(?:pub |export |inline |noinline )*fn \w+\(.*", re.MULTILINE)
ZIG_ASSERTION = re.compile(r"\bassert\(")
ZIG_TEST = re.compile(r"^(?:test|comptime)\b[^\n]*\{\n.*?^\}$", re.MULTILINE | re.DOTALL)
ZIG_COMMENT = re.compile(r"//.*")
ZIG_GROUPS = ("rings", "grants", "relay", "session")


def zig_figures(root: Path) -> dict[str, dict[str, float]]:
    """Count functions and assertions of the library and its most delicate rooms, without tests and fuzz targets.

    "session" is the files of that name: the session of a link, and that of TLS.
    """
    source = root / "native" / "src"
    functions, assertions = Counter[str](), Counter[str]()
    for path in sorted(source.rglob("*.zig")):
        if path.stem.startswith("fuzz") or path.stem.endswith(("test", "tests", "stage")):
            continue
        text = ZIG_COMMENT.sub("", ZIG_TEST.sub("", path.read_text()))
        groups = {"all", path.parent.name, path.stem} & {"all", *ZIG_GROUPS}
        for group in groups:
            functions[group] += len(ZIG_FUNCTION.findall(text))
            assertions[group] += len(ZIG_ASSERTION.findall(text))
    return {
        group: {
            "functions": functions[group],
            "assertions": assertions[group],
            "a_function": round(assertions[group] / max(1, functions[group]), 2),
        }
        for group in ("all", *ZIG_GROUPS)
    }


# ---- documents, tests ------------------------------------------------------------------------------------------------


def document_figures(root: Path) -> dict[str, int]:
    pages = sorted((root / "docs").rglob("*.md"))
    essays = [path for path in pages if path.parent.name == "design" and path.name != "index.md"]
    words = {path: len(path.read_text().split()) for path in [*pages, *root.glob("*.md")]}
    return {
        "docs_words": sum(words[path] for path in pages),
        "docs_words_without_essays": sum(words[path] for path in pages if path not in essays),
        "top_level_words": sum(words[path] for path in root.glob("*.md") if path.name != "CHANGELOG.md"),
        "decisions": sum(len(re.findall(r"^## ", path.read_text(), re.MULTILINE)) for path in essays),
    }


def test_items(root: Path) -> int | None:
    """Let pytest collect the tests; None where it fails."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    found = re.search(r"^(?:\d+/)?(\d+) tests collected", done.stdout, re.MULTILINE)
    return int(found[1]) if found else None


# ---- all -------------------------------------------------------------------------------------------------------------


def figures(root: Path) -> dict[str, object]:
    """Return all figures of a checkout but the number of test items."""
    modules = python_modules(root)
    sizes = [module.lines for module in modules]
    code = sum(len(code_lines(module)) for module in modules)
    imports = sum(len(import_lines(module)) for module in modules)
    met = Counter(min(len(classes), 2) for classes in implementations(read_classes(modules)).values())
    return {
        "lines": sum(sizes),
        "code_lines": code,
        "docstring_lines": sum(len(docstring_lines(module.tree)) for module in modules),
        "files": len(modules),
        "median_lines": int(statistics.median(sizes)),
        "files_under_60_lines": sum(lines < 60 for lines in sizes),
        "longest_file_lines": max(sizes),
        "protocols": met.total(),
        "protocols_met_by_no_class": met[0],
        "protocols_met_by_one_class": met[1],
        "import_lines": imports,
        "imports_percent_of_code": round(100 * imports / code, 1),
        "modules_of_import": imported_modules(root),
        **document_figures(root),
        "files_by_folder": files_by_folder(modules),
        "zig": zig_figures(root),
    }


def as_text(found: dict[str, object]) -> str:
    lines: list[str] = []
    for name, value in found.items():
        if isinstance(value, dict):
            lines += ["", f"{name.replace('_', ' ')}:"]
            lines += [f"  {key:<26}{shown(inner):>10}" for key, inner in value.items()]
        else:
            lines.append(f"{name.replace('_', ' '):<28}{shown(value):>10}")
    return "\n".join(lines)


def shown(value: object) -> str:
    if isinstance(value, dict):
        return f"{value['assertions']} in {value['functions']} functions: {value['a_function']} each"
    return "unknown" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tree_figures", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout than this one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--protocols", action="store_true", help="list the protocols and the classes that meet them")
    parser.add_argument("--items", action="store_true", help="count the items that pytest collects, too")
    chosen = parser.parse_args()
    root = chosen.root.resolve()
    found: dict[str, object]
    if chosen.protocols:
        found = dict(implementations(read_classes(python_modules(root))))
        text = "\n".join(f"{name}: {', '.join(map(str, value)) or '-'}" for name, value in found.items())  # type: ignore[call-overload]
    else:
        found = figures(root) | ({"test_items": test_items(root)} if chosen.items else {})
        text = as_text(found)
    print(json.dumps(found, indent=2) if chosen.json else text)


if __name__ == "__main__":
    main()
