"""Pages of the reference that are made from the sources: public names, events, limits.

Sources are read, not imported: no torch is needed.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"

GROUPS = {
    "actors": ("Actors and meshes", "What programs start processes, spawn actors and call them with."),
    "shapes": ("Shapes", "Extents, points, regions, and values with coordinates."),
    "supervision": ("Supervision", "Policies: what the loss of a process or the failure of an actor does."),
    "errors": (
        "Errors",
        "Exceptions, and where they came from.",
    ),
    "events": ("Events", "Records of `mesh.events()`. In a table: [Events](docs/reference/events.md)."),
}
"""Pages of the names of `trimesh` itself, with title and first line. Each other page is one public package."""

GROUP_OF = {
    "trimesh.errors": "errors",
    "trimesh.events": "events",
    "trimesh.shape": "shapes",
    "trimesh._supervision": "supervision",
}
"""Package that defines a name, and its page; all others are on the page of actors."""

MODULES = ("service.weights",)
"""Public modules inside of packages that have a page, too."""


def parsed(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    path = SOURCE / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def public(module: str) -> list[str]:
    """Return the names in the `__all__` of a module."""
    for node in parsed(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    return []


def origins(module: str) -> dict[str, str]:
    """Return the modules that a module imports names from, by name."""
    imports = (node for node in ast.walk(parsed(module)) if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}


def packages() -> list[str]:
    """Return the packages among the public names of `trimesh`."""
    origin = origins("trimesh")
    return [name for name in public("trimesh") if origin.get(name) == "trimesh"]


def names_by_page() -> dict[str, list[str]]:
    """Return each page of the reference of names, and the full names on it, in order.

    A name that a public package has, too, stands on the page of the package.
    """
    found: dict[str, list[str]] = {group: [] for group in GROUPS}
    origin, inside = origins("trimesh"), packages()
    for name in (*inside, *MODULES):
        found[name] = [f"trimesh.{name}.{member}" for member in public(f"trimesh.{name}")]
    for name in public("trimesh"):
        module = origin.get(name, "")
        package = ".".join(module.split(".")[:2])
        owner = package.removeprefix("trimesh.")
        page = owner if owner in inside else GROUP_OF.get(package, "actors")
        if name not in inside and f"{package}.{name}" not in found[page]:
            found[page].append(f"trimesh.{name}")
    return found


def api_pages() -> dict[str, str]:
    """Return path on the site and text of the pages of public names."""
    made = {}
    for page, names in names_by_page().items():
        if page in GROUPS:
            title, first = GROUPS[page]
        else:
            title, first = f"trimesh.{page}", ast.get_docstring(parsed(f"trimesh.{page}")) or ""
        body = "\n\n".join(f"::: {name}" for name in names)
        made[f"reference/api/{page}.md"] = f"# {title}\n\n{first}\n\n{body}\n"
    return made


def api_titles() -> dict[str, str]:
    """Return title and path on the site of the pages of public names, in the order of the menu."""
    return {text.splitlines()[0].removeprefix("# "): path for path, text in api_pages().items()}


# ---- limits ----------------------------------------------------------------------------------------------------------

SECTION = re.compile(r"^# ---- (.+) ----$", re.MULTILINE)
BOUND = re.compile(r'^(\w+): Final = ([^\n]+)\n"""(.+?)"""$', re.MULTILINE | re.DOTALL)
"""Name, value as written, and reason."""


def limits_page() -> str:
    """Return the page of all bounds."""
    parts = [
        "# Limits",
        "Every queue, retry, buffer and wait has a bound with a name, a unit and a reason, in `trimesh.limits`. "
        "They are constants of a release: what programs may choose is an option of the call or the block concerned. "
        "What happens at a bound is either a wait, which can be cancelled, or an error that names it "
        "([Exceptions](exceptions.md)).",
    ]
    _, *sections = SECTION.split((SOURCE / "trimesh" / "limits.py").read_text())
    for title, text in zip(sections[::2], sections[1::2], strict=True):
        rows = [f"| `{b[1]}` | {shown(b[2])} | {cell(' '.join(b[3].split()))} |" for b in BOUND.finditer(text)]
        parts += [f"## {title}", "\n".join(["| name | value | meaning |", "|---|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def shown(value: str) -> str:
    """Return the value of a bound for people: sizes by their unit."""
    for shift, unit in ((" << 30", "GiB"), (" << 20", "MiB"), (" << 10", "KiB")):
        number = value.removesuffix(shift)
        if number != value and number.isdigit():
            return f"{number} {unit}"
    return f"{int(value):,}" if value.isdigit() else f"`{value}`" if any(c.isalpha() for c in value) else value


def cell(text: str) -> str:
    """Return a text as a cell of a table."""
    return text.replace("|", "\\|")


# ---- events ----------------------------------------------------------------------------------------------------------


def is_event(record: ast.ClassDef) -> bool:
    """Tell whether a record is one that `events()` yields."""
    return record.name == "Lagged" or "MemberEvent" in map(ast.unparse, record.bases)


def events_page() -> str:
    """Return the page of all events."""
    rows = []
    for node in parsed("trimesh.events").body:
        if not isinstance(node, ast.ClassDef) or not is_event(node):
            continue
        said = (ast.get_docstring(node) or "").split("Attributes:")
        fields = [ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign)]
        rows.append(f"| `{node.name}` | {cell(' '.join(said[0].split()))} | {', '.join(f'`{f}`' for f in fields)} |")
    return (
        "\n\n".join(
            [
                "# Events",
                "`async with mesh.events() as events:` yields these records, of process and actor meshes. Each has "
                "`mesh`, `point` and `incarnation`, but `Lagged`, which is about the reader. How they come and end: "
                "[Supervision](../supervision.md#events). All fields with types: [names](api/events.md).",
                "\n".join(["| event | it says | fields of its own |", "|---|---|---|", *rows]),
            ]
        )
        + "\n"
    )


def pages() -> dict[str, str]:
    """Return path on the site and text of every page that is made from the sources."""
    return {**api_pages(), "reference/limits.md": limits_page(), "reference/events.md": events_page()}
