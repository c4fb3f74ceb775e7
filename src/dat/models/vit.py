"""Vision Transformers (Dosovitskiy et al., "An image is worth 16x16 words", ICLR 2021), plain ones.

As Beyer et al. ("Better plain ViT baselines", 2022) have it: fixed positions, made of sines and
cosines, and the mean of all tokens instead of a class token; so images of any size fit. What does
not fill its last patches is filled up with zeros.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

HEAD = 64
"""Values that one attention head looks at."""
LONGEST = 10_000.0
"""Of the positions' waves, in patches."""


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        most = max(1, width // HEAD)
        self.heads = next(it for it in range(most, 0, -1) if width % it == 0)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        three = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(three[0], three[1], three[2])
        return cast(Tensor, self.out(seen.transpose(1, 2).flatten(2)))


class EncoderBlock(nn.Module):
    """Attention and a hidden layer of four times the width, each after its norm, beside what they
    are added to."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.hidden = nn.Linear(width, 4 * width)
        self.out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return cast(Tensor, x + self.out(F.gelu(self.hidden(self.norm2(x)))))


class ViT(nn.Module):
    def __init__(self, classes: int, *, channels: int, patch: int, width: int, depth: int) -> None:
        super().__init__()
        self.patch = patch
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.blocks = nn.Sequential(*(EncoderBlock(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = placed(self.patches(filled_up(x, self.patch)))
        return cast(Tensor, self.head(self.norm(self.blocks(tokens)).mean(1)))


@fx.wrap
def filled_up(x: Tensor, patch: int) -> Tensor:
    """With whole patches only; one step to a tracer, which could not follow the sizes."""
    height, width = x.shape[-2:]
    below, right = -height % patch, -width % patch
    return F.pad(x, (0, right, 0, below)) if below or right else x


@fx.wrap
def placed(grid: Tensor) -> Tensor:
    """Patches as a row of tokens that know where they are: a quarter of their values each for sine
    and cosine of the row and of the column."""
    rows, columns = (
        torch.arange(side, device=grid.device, dtype=grid.dtype) for side in grid.shape[-2:]
    )
    quarter = -(-grid.shape[1] // 4)
    steps = torch.arange(quarter, device=grid.device, dtype=grid.dtype) / max(quarter - 1, 1)
    waves = LONGEST**-steps
    row, column = rows[:, None] * waves, columns[:, None] * waves
    shape = len(rows), len(columns), quarter
    parts = (column.sin(), column.cos(), row.sin(), row.cos())
    spread = [
        part.expand(shape) if number < 2 else part[:, None].expand(shape)
        for number, part in enumerate(parts)
    ]
    positions = torch.cat(spread, 2).flatten(0, 1)[:, : grid.shape[1]]
    return grid.flatten(2).transpose(1, 2) + positions


def vit_4(classes: int, *, channels: int = 3, width: int | None = None) -> nn.Module:
    """For small images: patches of 4 x 4, 6 blocks, 192 wide unless told."""
    width = 192 if width is None else width
    return ViT(classes, channels=channels, patch=4, width=width, depth=6)


def vit_16(classes: int, *, channels: int = 3, width: int | None = None) -> nn.Module:
    """ViT-S/16: patches of 16 x 16, 12 blocks, 384 wide; 192 is Ti and 768 is B."""
    width = 384 if width is None else width
    return ViT(classes, channels=channels, patch=16, width=width, depth=12)
