"""The worked examples in the docstrings of `trimesh.shape` are right."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["extent", "region", "value_mesh"])
def test_doctests_pass(name):
    results = doctest.testmod(importlib.import_module(f"trimesh.shape.{name}"))

    assert results.attempted > 0
    assert results.failed == 0
