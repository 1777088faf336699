"""Where the tensors of a rank are."""

from __future__ import annotations

import torch


def default_device() -> torch.device:
    """Return the device that the controller takes ranks to have: CUDA where it has it itself, so that both agree.

    Its number is that of the controller's own device, which fake tensors are given; ranks have their own.
    """
    if torch.cuda.is_available():
        from trimesh.untried import warn_untried  # noqa: PLC0415 - few programs have a device

        warn_untried("the tensor engine on CUDA devices")
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def rank_device(number: int) -> torch.device:
    """Return the device of a rank: those of its host in turn, so that several ranks may share one."""
    if torch.cuda.is_available():
        return torch.device("cuda", number % torch.cuda.device_count())
    return torch.device("cpu")
