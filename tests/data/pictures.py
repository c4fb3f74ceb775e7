"""Picture files for tests, real JPEGs and PNGs that Pillow wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def pixels(seed: int, height: int, width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Smooth colors, so that a JPEG keeps them nearly."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (3, 3, 3), np.uint8)
    return np.array(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))


def write(file: Path, seed: int, height: int = 24, width: int = 24) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, height, width)).save(file, quality=95)


def folder(
    root: Path,
    *,
    splits: tuple[str, ...] = ("train", "val"),
    classes: tuple[str, ...] = ("ant", "bee", "cow"),
    each: int = 4,
    ending: str = ".jpg",
    sizes: tuple[tuple[int, int], ...] = ((24, 24),),
) -> Path:
    """SPLIT/CLASS/NUMBER.jpg, the sizes in turn."""
    seed = 0
    for split in splits:
        for name in classes:
            for number in range(each):
                write(root / split / name / f"{number}{ending}", seed, *sizes[seed % len(sizes)])
                seed += 1
    return root
