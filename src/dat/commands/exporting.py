"""The command that gives a model away."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dat.commands.arguments import Commands, words_of
from dat.files import WEIGHTS


def add(commands: Commands) -> None:
    export = commands.add(
        "export",
        _export,
        "leave a run's model in a folder for model hubs, as ONNX, TorchScript or .pt2",
        "  dat export runs/digits\n"
        "  dat export runs/digits --weights ema-best --format hub,onnx --out digits-robust\n"
        "Normalisation is inside the model: it takes images in [0, 1]. Each file is read back\n"
        "and compared with the run's model before it stays. dat.load(DIR) builds it again.",
    )
    export.add_argument(
        "mixed", nargs="+", metavar="RUN|key=value", help="a run's folder; where its data is now"
    )
    export.add_argument("--weights", default="best", metavar="W", help=f"{', '.join(WEIGHTS)}")
    export.add_argument(
        "--format",
        type=words_of,
        default=("hub",),
        metavar="LIST",
        help="hub (safetensors and a model card), onnx, torchscript, exported (torch.export); "
        "several with commas (hub)",
    )
    export.add_argument("--out", type=Path, metavar="DIR", help="(RUN/export/WEIGHTS)")
    export.add_argument("--overwrite", action="store_true", help="replace an export that is there")


def _export(arguments: argparse.Namespace, words: list[str]) -> int:
    from dat.config import parse_edits
    from dat.export import export_run
    from dat.report import print_json

    if len(arguments.runs) != 1:
        raise ValueError("give the folder of one run")
    other = [word for word in arguments.settings if not word.startswith("data.")]
    if other:
        raise ValueError(f"{other[0]}: a run is exported as it is; only data.* may be given")
    found = export_run(
        arguments.runs[0],
        weights=arguments.weights,
        formats=arguments.format,
        out=arguments.out,
        edits=parse_edits(arguments.settings),
        overwrite=arguments.overwrite,
    )
    print_json(found) if arguments.json else _show(found)
    return 0


def _show(found: dict[str, Any]) -> None:
    from dat.report import print_table

    rows = [
        [it["format"], it["file"], f"{it['bytes'] / 1e6:.2f}", f"{it['difference']:.1e}"]
        for it in found["files"]
    ]
    note = (
        f"{found['folder']}: the {found['weights']} weights, config.json and a model card. "
        "Difference: of logits, beside the run's model, as a share of the largest."
    )
    print_table(["Format", "File", "MB", "Difference"], rows, note=note)
