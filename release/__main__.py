"""Makes and checks the files of a release in dist/: `make release`, or `make release REHEARSE=1` before it is one.

1. The tree is clean and the changelog has the version. A rehearsal leaves that out.
2. The source distribution, and from it, unpacked in another folder with an empty cache, a wheel for each target.
3. The same again from the tree: both times the same bytes.
4. Tags, files and native library of each wheel; `auditwheel show` where it can.
5. The wheels of this machine in a new environment of each Python that is here; the source distribution in one.
6. A bill of materials of what such an environment has, and the checksums of all.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from hatch_build import TARGET_VARIABLE, TARGETS, zig_target

from release import changelog, wheel

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.14t")


def fail(text: str) -> NoReturn:
    """End the release."""
    sys.exit(f"release: {text}")


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Run a command and return what it prints, or end the release."""
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ---- building --------------------------------------------------------------------------------------------------------


def build(kind: str, tree: Path, to: Path, epoch: str, **variables: str) -> None:
    """Build a distribution of a tree; all times in it are `epoch`."""
    run(
        sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", to, cwd=tree, SOURCE_DATE_EPOCH=epoch, **variables
    )


def build_all(tree: Path, to: Path, epoch: str, cache: Path) -> None:
    """Build a wheel of a tree for each target.

    Args:
        tree: Where the sources are.
        to: Folder of the wheels.
        epoch: Seconds since 1970 that every file in them has as its time.
        cache: Where Zig keeps what it has compiled of this tree.
    """
    caches = {"ZIG_LOCAL_CACHE_DIR": str(cache), "ZIG_GLOBAL_CACHE_DIR": str(ROOT / ".zig-cache" / "global")}
    for target in TARGETS:
        build("wheel", tree, to, epoch, **caches, **{TARGET_VARIABLE: target})


def compare(first: Path, second: Path) -> None:
    """End the release if two builds differ."""
    differing = [path.name for path in sorted(first.iterdir()) if digest(path) != digest(second / path.name)]
    if differing:
        fail(f"these differ between two builds: {', '.join(differing)}")


# ---- checking --------------------------------------------------------------------------------------------------------


def check(path: Path, target: str) -> None:
    """End the release if a wheel is not what it should be."""
    found = list(wheel.complaints(path, target))
    if found:
        fail(f"{path.name}: {'; '.join(found)}")
    if target == zig_target() and "gnu" in target:  # it needs the libraries of the target
        shown = run(sys.executable, "-m", "auditwheel", "show", path)
        if f"manylinux_2_17_{platform.machine()}" not in shown:
            fail(f"{path.name}: auditwheel says\n{shown}")


def interpreters() -> dict[str, str]:
    """Return version and path of each Python that is here and works."""
    folder = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for version in PYTHONS:
        for candidate in [f"python{version}", *map(str, sorted(folder.glob(f"{version}.*/bin/python")))]:
            probe = "import sys, venv; print('%d.%d' % sys.version_info[:2], sys.executable)"
            done = subprocess.run([candidate, "-c", probe], capture_output=True, text=True, check=False) \
                if shutil.which(candidate) else None  # fmt: skip
            if done is not None and done.stdout.startswith(f"{version.rstrip('t')} "):
                found[version] = done.stdout.split(maxsplit=1)[1].strip()
                break
    return found


def installed(python: str, distribution: Path, folder: Path) -> Path:
    """Install a distribution in a new environment, try it there, and return the environment's Python."""
    run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    run(inside, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", distribution)
    print("  ", run(inside, "-I", ROOT / "release" / "smoke.py", cwd=folder).strip())
    return inside


def try_out(sources: Path, wheel_here: Path, folder: Path) -> Path:
    """Install and try what this machine can run; return a Python whose environment has the wheel and no more."""
    found = interpreters()
    print(f"  Pythons: {', '.join(found)}; not here: {', '.join(set(PYTHONS) - set(found)) or 'none'}")
    with ThreadPoolExecutor(2) as pool:
        tried = {version: pool.submit(installed, found[version], wheel_here, folder / version) for version in found}
        pythons = {version: one.result() for version, one in tried.items()}
    oldest = next(iter(found))
    print("   the source distribution:")
    installed(found[oldest], sources, folder / "sources")
    run(pythons[oldest], "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", "pip")
    return pythons[oldest]


# ---- the release -----------------------------------------------------------------------------------------------------


def preconditions(version: str, *, rehearse: bool) -> None:
    """End the release if the tree is not ready for one."""
    if rehearse:
        return
    if run("git", "status", "--porcelain"):
        fail("the tree must be clean: commit, or stash, what `git status` shows")
    if changelog.fragments():
        fail("fragments must be in the changelog: `make changelog`")
    if f"\n## {version}\n" not in (ROOT / "CHANGELOG.md").read_text():
        fail(f"CHANGELOG.md must have a heading `## {version}`; rename `## Unreleased`")


def main(options: Sequence[str]) -> None:
    """Do all of it, in order."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = project["version"]
    preconditions(version, rehearse="--rehearse" in options)
    epoch = run("git", "log", "-1", "--format=%ct").strip()
    shutil.rmtree(DIST, ignore_errors=True)

    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        print("source distribution")
        build("sdist", ROOT, DIST, epoch)
        (sources,) = DIST.iterdir()
        build("sdist", ROOT, work / "again", epoch)
        with tarfile.open(sources) as archive:
            archive.extractall(work / "unpacked", filter="data")
        (tree,) = (work / "unpacked").iterdir()

        print("wheels, from the source distribution")
        build_all(tree, DIST, epoch, work / "zig-cache")
        print("wheels, from the tree")
        build_all(ROOT, work / "again", epoch, ROOT / ".zig-cache")
        compare(DIST, work / "again")

        print("checks")
        paths = {target: DIST / wheel.file_name(project["name"], version, target) for target in TARGETS}
        for target, path in paths.items():
            check(path, target)
        print("clean environments")
        python = try_out(sources, paths[zig_target()], work)
        bill = DIST / f"{sources.name.removesuffix('.tar.gz')}.cdx.json"
        sbom = ("-m", "cyclonedx_py", "environment", "--output-reproducible", "--mc-type", "library")
        run(sys.executable, *sbom, "--pyproject", "pyproject.toml", "-o", bill, python, SOURCE_DATE_EPOCH=epoch)

    files = sorted(DIST.iterdir())
    (DIST / "SHA256SUMS").write_text("".join(f"{digest(path)}  {path.name}\n" for path in files))
    print((DIST / "SHA256SUMS").read_text(), end="")
    print(f"{project['name']} {version} is ready in dist/. Tag v{version}, then upload; nothing was uploaded.")


if __name__ == "__main__":
    main(sys.argv[1:])
