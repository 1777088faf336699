"""Which worker of pytest-xdist runs which test: a plugin for the one process that hands them out.

A fixture of a module may start a mesh and run hundreds of cases on it. Each worker that ran some tests of the file
would make it anew, so one worker gets the whole file; files of many tests go first, that none of them is left for the
end. All other tests go one by one to whoever is free. The mark `xdist_group` is not used: xdist hands groups over in
node ids, which pytest 9.2 no longer lets it change, and then runs the tests as if they had none, without a word.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest


@functools.cache
def is_shared(path: Path) -> bool:
    """Return whether the tests of a file share a fixture that is made once for the file."""
    return path.is_file() and 'scope="module"' in path.read_text()


def share_of(root: Path, nodeid: str) -> str:
    """Return what a test is handed out with: the name of its file, or its own."""
    file = nodeid.partition("::")[0]
    return file if is_shared(root / file) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out tests in this way, where the command line does not choose another one by `--dist`."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Sharing(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return share_of(config.rootpath, nodeid)

    return Sharing(config, log)
