"""What a wheel of a release must be: its tags, its files, and the machine and libraries of its native library."""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from hatch_build import HEADER, LIBRARY, TARGETS

MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}

LIBRARIES = {
    "gnu": re.compile(r"(libc\.so\.6|libm\.so\.6|libpthread\.so\.0|libdl\.so\.2|librt\.so\.1|ld-linux[\w.-]*)"),
    "musl": re.compile(r"libc\.so|libc\.musl-\w+\.so\.1"),
}
"""Libraries of the system that the native library may ask for; UCX is looked for when it is used."""

GLIBC_MAX = (2, 17)

NEEDED = {
    "trimesh/__init__.py",
    "trimesh/py.typed",
    f"trimesh/_native/{LIBRARY}",
    f"trimesh/_native/{HEADER}",
    "trimesh/_native/declared.py",
}
ALLOWED = re.compile(
    r"trimesh/[\w/]+\.py|trimesh/py\.typed|trimesh/_native/(libtrimesh\.so|trimesh\.h)|[\w.-]+\.dist-info/.+"
)


def file_name(distribution: str, version: str, target: str) -> str:
    """Return the file name of the wheel of a target."""
    return f"{distribution.replace('-', '_')}-{version}-py3-none-{TARGETS[target]}.whl"


def complaints(path: Path, target: str) -> Iterator[str]:
    """Yield what is wrong with a wheel.

    Args:
        path: The wheel.
        target: What it was built for, a key of `TARGETS`.
    """
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        yield from (f"lacks {name}" for name in sorted(NEEDED - set(names)))
        yield from (f"has {name}, which is no part of the package" for name in names if not ALLOWED.fullmatch(name))
        metadata = next(name for name in names if name.endswith(".dist-info/WHEEL"))
        tags = set(re.findall(r"^Tag: (.*)$", archive.read(metadata).decode(), re.MULTILINE))
        wanted = {f"py3-none-{platform}" for platform in TARGETS[target].split(".")}
        if tags != wanted:
            yield f"has the tags {sorted(tags)}, not {sorted(wanted)}"
        if set(names) >= NEEDED:
            yield from library_complaints(archive.read(f"trimesh/_native/{LIBRARY}"), target)


def library_complaints(library: bytes, target: str) -> Iterator[str]:
    """Yield what is wrong with a native library."""
    machine, _, libc = target.split("-", 2)
    elf = ELFFile(io.BytesIO(library))
    if elf["e_machine"] != MACHINES[machine]:
        yield f"its library is for {elf['e_machine']}, not {MACHINES[machine]}"
    allowed = LIBRARIES[libc.split(".")[0]]
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            tags: list[Any] = list(section.iter_tags())
            needed = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
            yield from (f"its library needs {name}" for name in needed if not allowed.fullmatch(name))
        if isinstance(section, GNUVerNeedSection):
            versions = [version.name for _, auxiliaries in section.iter_versions() for version in auxiliaries]
            yield from (f"its library needs {name}" for name in versions if not is_old(name))


def is_old(version: str) -> bool:
    """Tell whether every system of `GLIBC_MAX` has a version of symbols."""
    found = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(?:\.\d+)?", version)
    return found is not None and (int(found[1]), int(found[2])) <= GLIBC_MAX
