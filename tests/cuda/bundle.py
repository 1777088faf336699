"""Builder of `build/cuda-bundle`: a folder that tests and measures trimesh on a GPU machine without network.

    python -m tests.cuda.bundle --python 3.12 --ucx cu13

The folder has wheels for that version of Python, the tests, examples and benches, and `cuda.sh`, which runs there. It
needs torch and numpy of the machine. `make cuda-bundle` sets the options.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import io
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).parents[2]
NEEDED: Final = ("trimesh-actors[cli,testing]", "hypothesis", "pytest-timeout", "pytest-trio")
"""What tests, examples and benches of devices import besides torch and numpy."""
INSTALLER: Final = "pip"
"""It travels along: an environment that uv has made has none."""
FOLDERS: Final = ("tests", "examples", "bench", "tools")
LEFT_OUT: Final = ("bench/results/",)
PLATFORMS: Final = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
KEPT_OF_UCX: Final = re.compile(
    r"libucx/lib/(ucx/)?\w+\.so\.0$|libucx/__init__\.py$|libucx_cu\d+\.libs/|.*\.dist-info/"
)
"""What runs of a wheel of UCX. The rest, five sixths of it, is copies under other names, archives and tools."""
NOT_KEPT_OF_UCX: Final = re.compile(r"perftest")
MEBIBYTES_MAX: Final = 60


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.cuda.bundle", description="Build build/cuda-bundle.")
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, help="version of the machine's Python (default: %(default)s)")
    parser.add_argument("--machine", default="x86_64", help="its architecture (default: %(default)s)")
    parser.add_argument("--ucx", default="cu13", help="UCX for CUDA: cu13, cu12, or none (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "cuda-bundle", help="where (default: there)")
    return parser.parse_args()


def run(*command: str | Path) -> str:
    """Run a program in the root of the checkout; show what it printed only if it fails."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


# ---- wheels ----------------------------------------------------------------------------------------------------------


def needed(texts: Iterable[str], python: str) -> dict[str, str]:
    """Return the versions, installed here, of all that some requirements need, but not of trimesh itself."""
    versions: dict[str, str] = {}
    seen = set[tuple[str, frozenset[str]]]()
    pending = [Requirement(text) for text in texts]
    while pending:
        one = pending.pop()
        key = one.name.lower(), frozenset(one.extras)
        if key in seen:
            continue
        seen.add(key)
        versions[one.name] = importlib.metadata.version(one.name)
        for text in importlib.metadata.requires(one.name) or ():
            inner = Requirement(text)
            environments = [{"python_version": python, "extra": extra} for extra in ("", *one.extras)]
            if inner.marker is None or any(map(inner.marker.evaluate, environments)):
                pending.append(inner)
    del versions["trimesh-actors"]
    return versions


def download(folder: Path, requirements: Iterable[str], python: str, machine: str) -> None:
    """Fetch wheels for another Python."""
    platforms = [f"--platform={name}_{machine}" for name in PLATFORMS] + ["--platform=any"]
    target = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *target, "-d", folder, *requirements]
    run(*command)


def trim_ucx(wheel: Path) -> None:
    """Leave in a wheel of UCX what runs, and in its record what is left."""
    trimmed = wheel.with_suffix(".trimmed")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(trimmed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as kept:
        names = [one for one in whole.namelist() if KEPT_OF_UCX.match(one) and not NOT_KEPT_OF_UCX.search(one)]
        for name in names:
            data = whole.read(name)
            if name.endswith("/RECORD"):
                rows = [row for row in csv.reader(io.StringIO(data.decode())) if row and row[0] in names]
                lines = io.StringIO()
                csv.writer(lines, lineterminator="\n").writerows(rows)
                data = lines.getvalue().encode()
            kept.writestr(name, data)
    trimmed.replace(wheel)


# ---- sources ---------------------------------------------------------------------------------------------------------


def copy_sources(tree: Path) -> None:
    """Copy what is tested and measured, and the settings of pytest."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS).splitlines()
    for name in ["pyproject.toml", *listed]:
        if (ROOT / name).is_file() and not name.startswith(LEFT_OUT):
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)


def tests_of_devices() -> list[str]:
    """Collect the node ids of all tests that are marked cuda; a file with one names CUDA or `tests.devices`."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search("cuda|tests.devices", path.read_text())]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "cuda", "-p", "no:xdist", *sorted(files)]
    found = [line for line in run(*command).splitlines() if re.match(r"tests/\S+\.py::", line)]
    if not found:
        sys.exit("no test is marked cuda: is torch installed here?")
    return found


# ---- the folder ------------------------------------------------------------------------------------------------------


def build(folder: Path, python: str, machine: str, ucx: str) -> None:
    """Make the folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    wheels, installer, tree = folder / "wheels", folder / "installer", folder / "tree"
    wheels.mkdir(parents=True)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels, ".")
    download(wheels, [f"{name}=={version}" for name, version in needed(NEEDED, python).items()], python, machine)
    download(installer, [f"{INSTALLER}=={importlib.metadata.version(INSTALLER)}"], python, machine)
    if ucx != "none":
        download(wheels, [f"libucx-{ucx}"], python, machine)
        trim_ucx(next(wheels.glob("libucx_*.whl")))
    copy_sources(tree)
    shutil.copyfile(ROOT / "tests" / "cuda" / "cuda.sh", folder / "cuda.sh")
    (folder / "python-version").write_text(f"{python}\n")
    about = {
        "commit": run("git", "rev-parse", "HEAD").strip(),
        "is_changed": bool(run("git", "status", "--porcelain", "--untracked-files=no").strip()),
        "python": python,
        "machine": machine,
        "ucx": ucx,
        "wheels": sorted(path.name for path in wheels.iterdir()),
        "tests": tests_of_devices(),
    }
    (folder / "bundle.json").write_text(json.dumps(about, indent=1))


def main() -> None:
    """Build, and say how large it is."""
    options = arguments()
    folder: Path = options.folder
    build(folder, options.python, options.machine, options.ucx)
    mebibytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / (1 << 20)
    if mebibytes > MEBIBYTES_MAX:
        sys.exit(f"{folder} has {mebibytes:.1f} MiB, at most {MEBIBYTES_MAX}: leave out UCX by CUDA_UCX=none")
    print(f"{folder}: {mebibytes:.1f} MiB for Python {options.python}; on the GPU machine run `bash cuda.sh` in it")


if __name__ == "__main__":
    main()
