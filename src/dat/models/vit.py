"""Plain Vision Transformers (Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021).

As in Beyer et al. ("Better plain ViT baselines", 2022), they have fixed sine-cosine position
embeddings and average pooling instead of a class token, so they accept images of any size. Images
are padded with zeros to a multiple of the patch size. `vit-16-convstem` has the convolutional stem
of robust models (Singh et al., NeurIPS 2023) in place of the patches.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from dat.models.layers import DropPath, StemLayer, conv_stem, drop_path_rates, share

HEAD_DIM = 64
"""The dimension of an attention head."""
TEMPERATURE = 10_000.0
"""The longest wavelength of the position embeddings, in patches, over 2 pi."""


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        most = max(1, width // HEAD_DIM)
        self.heads = next(heads for heads in range(most, 0, -1) if width % heads == 0)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        return cast(Tensor, self.out(attended.transpose(1, 2).flatten(2)))


class EncoderBlock(nn.Module):
    """A pre-norm transformer block: attention and an MLP of four times the width, both residual."""

    def __init__(self, width: int, *, drop_path_rate: float = 0.0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.hidden = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)
        self.drop_path = DropPath(drop_path_rate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attention(self.norm1(x)))
        return cast(Tensor, x + self.drop_path(self.out(F.gelu(self.hidden(self.norm2(x))))))


class ViT(nn.Module):
    """With `stem`, convolutions turn every `patch` x `patch` pixels into a token, instead of one
    linear map."""

    def __init__(
        self,
        classes: int,
        *,
        channels: int,
        patch: int,
        width: int,
        depth: int,
        stem: nn.Module | None = None,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.patch = patch
        self.patches = nn.Conv2d(channels, width, patch, stride=patch) if stem is None else stem
        rates = drop_path_rates(drop_path_rate, depth)
        self.blocks = nn.Sequential(*(EncoderBlock(width, drop_path_rate=rate) for rate in rates))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = add_positions(self.patches(pad_to_patches(x, self.patch)))
        return cast(Tensor, self.head(self.norm(self.blocks(tokens)).mean(1)))


@fx.wrap  # a leaf for fx, which cannot trace code that depends on sizes
def pad_to_patches(x: Tensor, patch: int) -> Tensor:
    """Pad images with zeros to a multiple of the patch size."""
    height, width = x.shape[-2:]
    below, right = -height % patch, -width % patch
    return F.pad(x, (0, right, 0, below)) if below or right else x


@fx.wrap
def add_positions(grid: Tensor) -> Tensor:
    """Flatten the patches to a sequence of tokens and add their position embeddings: a quarter of
    the channels each for sine and cosine of the row and of the column."""
    rows, columns = (
        torch.arange(side, device=grid.device, dtype=grid.dtype) for side in grid.shape[-2:]
    )
    quarter = -(-grid.shape[1] // 4)
    steps = torch.arange(quarter, device=grid.device, dtype=grid.dtype) / max(quarter - 1, 1)
    frequencies = TEMPERATURE**-steps
    row, column = rows[:, None] * frequencies, columns[:, None] * frequencies
    shape = len(rows), len(columns), quarter
    of_column = [part.expand(shape) for part in (column.sin(), column.cos())]
    of_row = [part[:, None].expand(shape) for part in (row.sin(), row.cos())]
    positions = torch.cat([*of_column, *of_row], 2).flatten(0, 1)[:, : grid.shape[1]]
    return grid.flatten(2).transpose(1, 2) + positions


def vit_4(
    classes: int, *, channels: int = 3, width: int | None = None, drop_path_rate: float = 0.0
) -> nn.Module:
    """For small images: patches of 4 x 4, 6 blocks, width 192 by default."""
    return ViT(
        classes,
        channels=channels,
        patch=4,
        width=192 if width is None else width,
        depth=6,
        drop_path_rate=drop_path_rate,
    )


def vit_16(
    classes: int, *, channels: int = 3, width: int | None = None, drop_path_rate: float = 0.0
) -> nn.Module:
    """ViT-S/16: patches of 16 x 16, 12 blocks, width 384 by default; 192 is Ti and 768 is B."""
    return ViT(
        classes,
        channels=channels,
        patch=16,
        width=384 if width is None else width,
        depth=12,
        drop_path_rate=drop_path_rate,
    )


def vit_16_convstem(
    classes: int, *, channels: int = 3, width: int | None = None, drop_path_rate: float = 0.0
) -> nn.Module:
    """ViT-S/16 with four convolutions of stride 2 in place of the patches; their widths are 1/8,
    1/4, 1/2 and 1 times that of the transformer."""
    width = 384 if width is None else width
    layers = [StemLayer(share(width, part)) for part in (1 / 8, 1 / 4, 1 / 2, 1)]
    return ViT(
        classes,
        channels=channels,
        patch=16,
        width=width,
        depth=12,
        stem=conv_stem(channels, layers, out=width),
        drop_path_rate=drop_path_rate,
    )
