"""`dat export`: a run's model for use elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dat.cli.arguments import Commands, str_list, trust_argument
from dat.core.files import WEIGHTS


def add(commands: Commands) -> None:
    export = commands.add(
        "export",
        _export,
        "export a run's model: a model hub folder, ONNX, TorchScript or .pt2 (torch.export)",
        "  dat export runs/digits\n"
        "  dat export runs/digits --weights ema-best --format hub,onnx --out digits-robust\n"
        "The exported model normalizes its inputs itself: it takes images in [0, 1]. Every file\n"
        "is read back and compared with the run's model. dat.load(DIR) rebuilds the model.",
    )
    export.add_argument(
        "mixed", nargs="+", metavar="RUN|key=value", help="a run folder; data.* if its data moved"
    )
    export.add_argument(
        "--weights", default="best", metavar="W", help=f"{', '.join(WEIGHTS)} (default: best)"
    )
    export.add_argument(
        "--format",
        type=str_list,
        default=("hub",),
        metavar="LIST",
        help="comma-separated: hub (safetensors and a model card), onnx, torchscript, exported "
        "(torch.export) (default: hub)",
    )
    export.add_argument(
        "--out", type=Path, metavar="DIR", help="output folder (default: RUN/export/WEIGHTS)"
    )
    export.add_argument("--overwrite", action="store_true", help="replace an existing export")
    trust_argument(export)


def _export(arguments: argparse.Namespace, argv: list[str]) -> int:
    from dat.config.runs import read_run
    from dat.config.schema import parse_edits
    from dat.config.trust import repeated_code
    from dat.export.formats import check_formats
    from dat.report import print_json

    if len(arguments.runs) != 1:
        raise ValueError("specify one run folder")
    (run,) = arguments.runs
    unchanged = repeated_code(read_run(run, trust=True)[1], arguments.settings)
    changed = [
        word
        for word in arguments.settings
        if not word.startswith("data.") and word not in unchanged
    ]
    if changed:
        raise ValueError(
            f"{changed[0]}: an export keeps the run's settings; only data.* can change"
        )
    edits = parse_edits(arguments.settings)
    check_formats(arguments.format)
    read_run(run, edits, trust=arguments.trust)
    from dat.export import export_run

    exported = export_run(
        run,
        weights=arguments.weights,
        formats=arguments.format,
        out=arguments.out,
        edits=edits,
        overwrite=arguments.overwrite,
        trust=arguments.trust,
    )
    print_json(exported) if arguments.json else _show(exported)
    return 0


def _show(exported: dict[str, Any]) -> None:
    from dat.report import print_table

    rows = [
        [file["format"], file["file"], f"{file['bytes'] / 1e6:.2f}", f"{file['difference']:.1e}"]
        for file in exported["files"]
    ]
    note = (
        f"{exported['folder']}: {exported['weights']} weights, config.json and a model card. "
        "Difference: the largest between the logits of the file and of the run's model, relative "
        "to the largest logit."
    )
    print_table(["Format", "File", "MB", "Difference"], rows, note=note)
