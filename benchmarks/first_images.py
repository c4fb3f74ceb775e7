"""The first images of a standard set as one .npz file, for measurements that must be short.

dat data fetch cifar10
python benchmarks/first_images.py cifar10 cifar15k.npz [--train 15000] [--test 2000]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from dat.data import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int)
    parser.add_argument("--test", type=int)
    arguments = parser.parse_args()
    splits = load(arguments.name)
    arrays = {}
    for name, data in (("train", splits.train), ("test", splits.test)):
        count = getattr(arguments, name)
        arrays[f"x_{name}"] = data.tensor()[:count].numpy()
        arrays[f"y_{name}"] = data.labels[:count].numpy()
    np.savez(arguments.out, **arrays)  # type: ignore[arg-type]
    print({name: (array.shape, array.dtype.name) for name, array in arrays.items()})


if __name__ == "__main__":
    main()
