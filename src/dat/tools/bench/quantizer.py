"""`dat bench quantizer`: the speed of encoding and decoding, and the quantization noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dat.distributed import Quantizer, quantizer_name
from dat.distributed.affinity import cores
from dat.distributed.wire_format import Slot, message_layout, spans
from dat.kernels.quantize.codec import Codec
from dat.report import counting
from dat.tools.bench.cases import make_quantizer
from dat.tools.bench.timing import take_turns


def bench_quantizer(
    bits: Sequence[int],
    quantizers: Sequence[str],
    *,
    values: int,
    repeats: int,
    threads: int | None = None,
) -> list[dict[str, Any]]:
    """Encode and decode normal random numbers, taking turns with a plain copy."""
    threads = threads or cores()
    torch.set_num_threads(threads)
    x = torch.randn(values, generator=torch.Generator().manual_seed(0))
    rows = []
    cases = [make_quantizer(name, b) for name in quantizers for b in bits]
    with counting("quantizing", len(cases), show=True) as progress:
        for quantizer in cases:
            row = _measure(quantizer, x, repeats, threads)
            rows.append({"quantizer": quantizer_name(quantizer), **row})
            progress(1)
    return rows


def _measure(quantizer: Quantizer, x: Tensor, repeats: int, threads: int) -> dict[str, Any]:
    layout = message_layout(spans([Slot((1, len(x)), 0)], quantizer), quantizer.bits)
    message = torch.zeros(layout.size, dtype=torch.uint8)
    codec = Codec(quantizer, threads=threads)
    copy, out = torch.empty_like(x), torch.zeros_like(x)
    timings = take_turns(
        {
            "copy": lambda: copy.copy_(x),
            "encode": lambda: codec.encode(x, layout, message, key=1),
            "decode": lambda: codec.decode(message, layout, out),
            "add": lambda: codec.decode(message, layout, out, "add"),
        },
        repeats=repeats,
    )
    seconds = {name: timing.median for name, timing in timings.items()}
    codec.decode(message, layout, out)
    error = (out - x).square().sum(dtype=torch.float64) / x.square().sum(dtype=torch.float64)
    return {
        "bits": quantizer.bits,
        "values": len(x),
        "threads": threads,
        "bits_a_value": 8 * layout.size / len(x),
        "noise": float(error),
        **{f"{name}_ms": 1e3 * median for name, median in seconds.items()},
        "to_copy": (seconds["encode"] + seconds["decode"]) / seconds["copy"],
    }
