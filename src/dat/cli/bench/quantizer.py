"""`dat bench quantizer`: the speed, size and noise of quantized gradients."""

from __future__ import annotations

import argparse

from dat.cli.arguments import Commands, int_list, scientific_int, str_list, timing_arguments


def add(bench: Commands) -> None:
    quantizer = bench.add(
        "quantizer",
        _quantizer,
        "benchmark gradient quantizers: speed relative to a copy, size, noise",
        "  dat bench quantizer --bits 8,4,2\n  dat bench quantizer --plot speed.png",
    )
    quantizer.add_argument(
        "--values",
        type=scientific_int,
        default=25_000_000,
        metavar="N",
        help="number of values (default: 25e6)",
    )
    quantizer.add_argument(
        "--bits",
        type=int_list,
        default=(16, 8, 4, 3, 2),
        help="bits per value, comma-separated (default: 16,8,4,3,2)",
    )
    quantizer.add_argument(
        "--quantizers",
        type=str_list,
        default=("bucket", "tensor", "vector"),
        help="comma-separated, e.g. bucket,vector (default: all)",
    )
    timing_arguments(quantizer)


def _quantizer(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.report import check_picture
    from dat.tools.bench.cases import make_quantizer

    if arguments.plot:
        check_picture(arguments.plot)
    for name in arguments.quantizers:
        for bits in arguments.bits:
            make_quantizer(name, bits)
    from dat.tools.bench import bench_quantizer, show_quantizer

    rows = bench_quantizer(
        arguments.bits,
        arguments.quantizers,
        values=arguments.values,
        repeats=arguments.repeats,
        threads=arguments.threads,
    )
    show_quantizer(rows, as_json=arguments.json, plot=arguments.plot)
    return 0
