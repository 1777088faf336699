"""What every test runs under: skips for what is not installed. The zombie guard is the plugin's (`pyproject.toml`)."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import signal

import pytest

# ---- what the shell has taken away -----------------------------------------------------------------------------------


def pytest_configure() -> None:
    """Handle Ctrl-C where the tests were started in the background: a script's shell has its jobs ignore SIGINT.

    Programs that tests start inherit the default then; a handler does not survive `exec`, to be ignored does.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# ---- what a collection looks at --------------------------------------------------------------------------------------


def pytest_collection_finish() -> None:
    """Let the garbage collector leave alone what is here before the first test: it is a quarter of a million objects.

    A full collection takes 0.2 s with them and nothing without, and many tests ask for one.
    """
    gc.collect()
    gc.freeze()


# ---- scripts ---------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option of `make scenarios`; here, because only what pytest reads first can add one."""
    parser.addoption("--rewrite-scenarios", action="store_true", help="write tests/scenarios/scripts anew")


# ---- what is not installed -------------------------------------------------------------------------------------------


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `torch` where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        for item in itertools.filterfalse(lambda item: item.get_closest_marker("torch") is None, items):
            item.add_marker(pytest.mark.skip(reason="torch is not installed"))
