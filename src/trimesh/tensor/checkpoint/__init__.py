"""Checkpoints: what a training needs to go on, on disk, in the format of `torch.distributed.checkpoint`."""
