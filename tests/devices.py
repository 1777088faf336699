"""Devices that the body of a test runs on: the CPU everywhere, which shows that the test is right, and CUDA."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

HAS_CUDA = importlib.util.find_spec("torch") is not None and importlib.import_module("torch").cuda.is_available()


def device_parameters(*values: object) -> list[object]:
    """Return parameters of a test for devices: values that name CUDA are marked so, others run where there is none."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[pytest.mark.cuda, pytest.mark.skipif(not HAS_CUDA, reason="torch finds no CUDA device")]
            if "cuda" in str(value)
            else [pytest.mark.skipif(HAS_CUDA, reason="runs on the CUDA device of this machine instead")],
        )
        for value in values
    ]


on_each_device = pytest.mark.parametrize("device", device_parameters("cpu", "cuda"))
"""The argument `device` of a test: "cpu", and "cuda" where torch finds one."""
