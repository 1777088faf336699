"""Small Llama, ViT and UNet models with a batch and a loss, and an actor that trains one by plain torch (DDP)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bench.workloads.plain_ranks import PlainRank
from trimesh import endpoint

LENGTH = 32
"""Tokens of a row of Llama; rows and columns of an image of ViT, twice those of UNet."""
ROWS = {("llama", 64): 8, ("llama", 512): 32, ("vit", 64): 8, ("vit", 512): 32, ("unet", 64): 8, ("unet", 512): 8}
"""Of a batch, over all ranks: with 512 a step of plain torch takes tenths of a second on two cores."""

Loss = Callable[..., Any]


def llama(width: int) -> tuple[Module, list[torch.Tensor], Loss]:
    """Return a Llama of two layers, a batch and the loss of both."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    text = torch.randint(0, 256, (ROWS["llama", width], LENGTH))
    return LlamaForCausalLM(config), [text], lambda model, text: model(text, labels=text, use_cache=False).loss


def vit(width: int) -> tuple[Module, list[torch.Tensor], Loss]:
    """Return a ViT of two layers, a batch and the loss of both."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=LENGTH,
        patch_size=4,
        num_labels=10,
    )
    rows = ROWS["vit", width]
    batch = [torch.randn(rows, 3, LENGTH, LENGTH), torch.randint(0, 10, (rows,))]
    return (
        ViTForImageClassification(config),
        batch,
        lambda model, images, kinds: cross_entropy(model(images).logits, kinds),
    )


def unet(width: int) -> tuple[Module, list[torch.Tensor], Loss]:
    """Return a UNet of two levels, a batch and the loss of both."""
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=LENGTH // 2,
        layers_per_block=1,
        block_out_channels=(width // 2, width),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    rows = ROWS["unet", width]
    batch = [torch.randn(rows, 3, LENGTH // 2, LENGTH // 2), torch.randint(0, 1000, (rows,))]
    return model, batch, lambda model, noisy, times: (model(noisy, times).sample - noisy).square().mean()


MAKERS = {"llama": llama, "vit": vit, "unet": unet}


class Training:
    """A model with its optimizer, the same each time.

    Args:
        name: Key of `MAKERS`.
        width: Of its layers.
        on: Puts the model where it trains.
    """

    def __init__(self, name: str, width: int, on: Callable[[Module], Module] = lambda model: model) -> None:
        torch.manual_seed(0)
        model, self.batch, self._loss = MAKERS[name](width)
        self.model = on(model)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def step(self, *batch: Any) -> Any:
        """Train by a batch; return the loss."""
        loss = self._loss(self.model, *batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


class ModelRank(PlainRank):
    """One of several ranks that train a model by `DistributedDataParallel`."""

    @endpoint
    def make(self, name: str, width: int) -> None:
        """Make the model that the next runs train."""
        training = Training(name, width, DistributedDataParallel)
        self.take(training.step, training.batch)
