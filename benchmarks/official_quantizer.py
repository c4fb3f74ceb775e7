"""Our quantizers beside the one of the paper's own repository, in one run, taking turns.

    python benchmarks/official_quantizer.py PATH/quantization.py [--values 25000000]

PATH is a checkout of the public repository dat-2022/dat, which is not part of this project. Its
RandomQuantizer quantizes a whole tensor by its L2 norm to 8 bits and back. Run it once as it is and
once with the allocator's thresholds raised (MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ at
4294967296), which suits the many large temporaries of its eager torch; the results are kept apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import torch
from runs import RESULTS, save, table

from dat.distributed import Buckets, Quantizer, WholeVector
from dat.distributed.wire_format import Slot, message_layout, spans
from dat.kernels.quantize.codec import Codec
from dat.tools.bench.timing import take_turns


def load(path: Path) -> Any:
    """The user's own copy of their module."""
    spec = importlib.util.spec_from_file_location("official", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RandomQuantizer()


def ours(quantizer: Quantizer, x: torch.Tensor, out: torch.Tensor) -> Any:
    """Encode and decode, into buffers that exist already, as they do in training."""
    layout = message_layout(spans([Slot((1, len(x)), 0)], quantizer), quantizer.bits)
    message = torch.zeros(layout.size, dtype=torch.uint8)
    codec = Codec(quantizer)

    def both() -> None:
        codec.encode(x, layout, message, key=1)
        codec.decode(message, layout, out)

    return both


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("official", type=Path)
    parser.add_argument("--values", type=int, default=25_000_000)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    official = load(arguments.official)
    x = torch.randn(arguments.values, generator=torch.Generator().manual_seed(0))
    copy, out = torch.empty_like(x), torch.empty_like(x)
    timings = take_turns(
        {
            "copy of the floats": lambda: copy.copy_(x),
            "official, 8 bits": lambda: official.dequantize(*official.quantize(x)),
            "bucket, 8 bits": ours(Buckets(bits=8), x, out),
            "bucket, 4 bits": ours(Buckets(bits=4), x, out),
            "vector, 8 bits": ours(WholeVector(bits=8), x, out),
        },
        repeats=arguments.repeats,
    )
    seconds = {name: timing.median for name, timing in timings.items()}
    allocator = "tuned" if os.environ.get("MALLOC_MMAP_THRESHOLD_") else "default"
    kept = RESULTS / "official_quantizer.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    results[allocator] = seconds | {"values": arguments.values, "threads": torch.get_num_threads()}
    rows = [
        [
            kind,
            name,
            f"{1e3 * found[name]:.1f}",
            f"{found['official, 8 bits'] / found[name]:.1f}",
            f"{found[name] / found['copy of the floats']:.2f}",
        ]
        for kind, found in sorted(results.items())
        for name in seconds
    ]
    headers = ["Allocator", "Encode + decode", "ms", "Times official", "Copies"]
    save(Path(__file__), results, table(headers, rows))


if __name__ == "__main__":
    main()
