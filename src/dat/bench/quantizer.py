"""`dat bench quantizer`: how fast values become bits and values again, and with how much noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dat.bench.comm import make_quantizer
from dat.bench.race import take_turns
from dat.comm import Quantizer, quantizer_name
from dat.comm.kernel import Codec
from dat.comm.message import Slot, compose, spans
from dat.comm.world import cores
from dat.report import counting


def bench_quantizer(
    bits: Sequence[int],
    quantizers: Sequence[str],
    *,
    values: int,
    repeats: int,
    threads: int | None = None,
) -> list[dict[str, Any]]:
    """Encode and decode normal random numbers, in turns with a copy of them."""
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
    layout = compose(spans([Slot((1, len(x)), 0)], quantizer), quantizer.bits)
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
    seconds = {job: timing.median for job, timing in timings.items()}
    codec.decode(message, layout, out)
    error = (out - x).square().sum(dtype=torch.float64) / x.square().sum(dtype=torch.float64)
    return {
        "bits": quantizer.bits,
        "values": len(x),
        "threads": threads,
        "bits_a_value": 8 * layout.size / len(x),
        "noise": float(error),
        **{f"{job}_ms": 1e3 * taken for job, taken in seconds.items()},
        "to_copy": (seconds["encode"] + seconds["decode"]) / seconds["copy"],
    }
