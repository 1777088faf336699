"""Checkpoints: the state of a training on disk, in the format of `torch.distributed.checkpoint`; safetensors."""
