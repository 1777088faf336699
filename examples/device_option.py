"""`--device`, of the examples whose ranks compute with tensors."""

from __future__ import annotations

import argparse
import os
import sys

import torch


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="where ranks compute (default: cuda where torch finds such a device)"
    )


def use_device(device: str | None) -> None:
    """Do as the option says; call it before anything looks for devices."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of this process, and of all that it starts
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda needs a CUDA device, and torch finds none")
