"""What makes a collection cheaper: it is done by each worker of pytest-xdist, and takes ten seconds of a processor.

Where nothing is compiled yet, as on a machine of CI, it takes twice that: pytest compiles each module of tests, and
each of the package, since that is a plugin, with assertions that explain themselves. Workers that began with the same
module at the same time would all compile everything; so each compiles a share of it first.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Generator
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import (
    PYC_TAIL,
    _rewrite_test,
    _write_pyc,
    assertstate_key,
    get_cache_dir,
    try_makedirs,
)

import trimesh

TESTS = Path(__file__).parent
PACKAGE = Path(trimesh.__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Collect without looking for garbage: what is made stays, and to look at it again and again is a quarter of it."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        number, count = os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"), os.environ["PYTEST_XDIST_WORKER_COUNT"]
        compile_share(session.config, int(number), int(count))
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        result = yield
    finally:
        if was_enabled:
            gc.enable()
    if any(item.get_closest_marker("cuda") is not None for item in session.items):
        start_cuda()
    return result


def start_cuda() -> None:
    """Start CUDA in this process, where torch sees a device, before the zombie guard looks at a first test.

    The driver keeps threads and descriptors from then on, which a test would seem to have left.
    """
    torch = sys.modules.get("torch")  # where it is installed, such a test has imported it
    if torch is not None and torch.cuda.is_available():
        weights = torch.ones(4, 4, device="cuda", requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once that a thread of autograd had no context before
            (weights @ weights).sum().backward()
        torch.empty(1 << 20, pin_memory=True)
        torch.cuda.synchronize()


def compile_share(config: pytest.Config, number: int, count: int) -> None:
    """Compile the modules of one worker of several, where pytest keeps them, unless something is there."""
    if sys.dont_write_bytecode or assertstate_key not in config.stash:
        return
    state = config.stash[assertstate_key]
    asked = [config.invocation_params.dir / argument.partition("::")[0] for argument in config.args]
    tests = [
        source
        for source in TESTS.rglob("test_*.py")
        if any(source.is_relative_to(one) for one in asked) and not is_ignored(config, source)
    ]
    modules = sorted([*tests, *PACKAGE.rglob("*.py")])
    for source in modules[number % count :: count]:
        folder = get_cache_dir(source)
        kept = folder / (source.name.removesuffix(".py") + PYC_TAIL)
        if not kept.exists() and try_makedirs(folder):
            said, code = _rewrite_test(source, config)
            _write_pyc(state, code, said, kept)


def is_ignored(config: pytest.Config, source: Path) -> bool:
    """Return whether the command line leaves out a module, or a folder that it is in."""
    folders = [one for one in source.parents if one.is_relative_to(TESTS)]
    return any(config.hook.pytest_ignore_collect(collection_path=one, config=config) for one in [source, *folders])
