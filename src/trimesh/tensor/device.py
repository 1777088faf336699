"""Where the tensors of a rank are."""

from __future__ import annotations

import torch


def default_device() -> torch.device:
    """Return the type of device that ranks use: CUDA where the controller has it, so that both sides agree."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
