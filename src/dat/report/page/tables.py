"""The text and tables of the page, without markup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dat.core.glossary import legend, plural, seconds
from dat.core.threat import show_radius
from dat.report.page.gather import RunRecord, Values, flatten

MATRIX_CLASSES = 20
"""With more classes the most frequent confusions are listed instead of a matrix."""
WORST = 20
"""Length of that list."""
NONE = "-"


@dataclass(frozen=True)
class Tile:
    """A headline figure."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under headers."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    picked: frozenset[int] = field(default_factory=frozenset)
    """Highlighted rows."""


def percent(value: object) -> str:
    return f"{value:.1f} %" if isinstance(value, int | float) else NONE


def megabytes(value: object) -> str:
    return f"{value:.3g} MB" if isinstance(value, int | float) else NONE


def tiles(run: RunRecord) -> list[Tile]:
    """The headline figures."""
    result, last = run.result or {}, run.epochs[-1] if run.epochs else {}
    images = f"{result.get('images')} test images"
    shown = [
        Tile("TA", percent(result.get("ta", last.get("holdout_ta"))), f"clean, {images}"),
        Tile("RA", percent(result.get("ra", last.get("holdout_ra"))), result.get("attack", "")),
    ]
    if not run.result:
        shown = [Tile(tile.name, tile.value, "held-out images, so far") for tile in shown]
    if run.aa is not None:
        shown.append(Tile("AA", percent(run.aa[0]), f"AutoAttack, {run.aa[1]} test images"))
    certified = run.newest("certify")
    if certified:
        for row in certified["ca"][:1]:
            note = (
                f"certified within an l2 radius of {row['radius']:g}, "
                f"{certified['images']} test images"
            )
            shown.append(Tile("CA", percent(row["ca"]), note))
    if run.epochs:
        total = sum(epoch["seconds"] for epoch in run.epochs)
        shown.append(Tile("Training", seconds(total), plural(len(run.epochs), "epoch")))
    if run.result and result.get("workers", 1) > 1:
        share = 100 * result["exposed_seconds_per_epoch"] / result["train_seconds_per_epoch"]
        shown.append(Tile("Waiting", percent(share), "of the time, for communication"))
        sent = megabytes(result["mb_per_step"])
        shown.append(Tile("Sent", sent, "per iteration, by all workers"))
    return shown


COMPARED: dict[str, Callable[[RunRecord], str]] = {
    "AA": lambda run: percent(run.aa and run.aa[0]),
    "Best epoch": lambda run: str((run.result or {}).get("best_epoch", NONE)),
    "C per epoch": lambda run: seconds((run.result or {}).get("comm_seconds_per_epoch")),
    "T per epoch": lambda run: seconds((run.result or {}).get("train_seconds_per_epoch")),
    "Sent per iteration": lambda run: megabytes((run.result or {}).get("mb_per_step")),
}


def comparison(runs: Sequence[RunRecord]) -> Table:
    """Runs side by side."""
    results = [run.result or {} for run in runs]
    attacks = list(dict.fromkeys(str(result["attack"]) for result in results if result))
    robust = {f"RA, {attack}" if len(attacks) > 1 else "RA": attack for attack in attacks}
    headers = ["Run", "Method", "TA", *robust, *COMPARED]
    rows = [
        [
            run.name,
            result.get("method", NONE),
            percent(result.get("ta")),
            *(
                percent(result.get("ra")) if result.get("attack") == attack else NONE
                for attack in attacks
            ),
            *(cell(run) for cell in COMPARED.values()),
        ]
        for run, result in zip(runs, results, strict=True)
    ]
    return Table("Runs", headers, rows, note=legend(headers, RA=" and ".join(attacks)))


def settings(runs: Sequence[RunRecord]) -> Table:
    """All settings; with several runs, those that differ come first, highlighted."""
    flat = [flatten(run.config) for run in runs]
    keys = list(dict.fromkeys(key for config in flat for key in config))
    rows = [[key, *(str(config.get(key, NONE)) for config in flat)] for key in keys]
    rows.sort(key=lambda row: len(set(row[1:])) == 1)
    picked = frozenset(n for n, row in enumerate(rows) if len(set(row[1:])) > 1)
    return Table("Settings", ["Setting", *(run.name for run in runs)], rows, picked=picked)


def classes(run: RunRecord) -> Table | None:
    """Accuracy per class."""
    analysis = run.examined
    if analysis is None:
        return None
    names, rows = analysis["names"], []
    for number, counts in enumerate(analysis["classes"]):
        if counts["images"]:
            share = 100 / counts["images"]
            mistakes = [[n, p] for t, p, n in analysis["confusions"] if t == number and p != number]
            frequent = f"{names[max(mistakes)[1]]} ({max(mistakes)[0]})" if mistakes else NONE
            accuracies = [percent(share * counts[key]) for key in ("right", "standing")]
            rows.append([names[number], str(counts["images"]), *accuracies, frequent])
    headers = ["Class", "Images", "TA", "RA", "Most often confused with"]
    attack = f"{analysis['attack']}, eps {show_radius(analysis['threat']['eps'])}"
    note = f"{legend(headers, RA=attack)} {analysis['images']} test images."
    return Table("Accuracy per class", headers, rows, note)


@dataclass(frozen=True)
class Confusions:
    """The confusion matrix under attack: images per class (rows) and prediction (columns)."""

    names: Sequence[str]
    counts: Sequence[Sequence[int]]

    def share(self, row: int, column: int) -> float:
        return self.counts[row][column] / max(sum(self.counts[row]), 1)


def confusions(run: RunRecord) -> Confusions | Table | None:
    """The confusion matrix, or for many classes the most frequent mistakes."""
    analysis = run.examined
    if analysis is None:
        return None
    names = analysis["names"]
    if len(names) <= MATRIX_CLASSES:
        counts = [[0] * len(names) for _ in names]
        for true, predicted, number in analysis["confusions"]:
            counts[true][predicted] = number
        return Confusions(names, counts)
    worst = sorted((-n, t, p) for t, p, n in analysis["confusions"] if t != p)[:WORST]
    rows = [[names[t], names[p], str(-n)] for n, t, p in worst]
    return Table("Most frequent mistakes under attack", ["Class", "Predicted", "Images"], rows)


@dataclass(frozen=True)
class GalleryItem:
    """An image of the gallery: its class, and the predictions before and after the attack."""

    label: str
    before: str
    after: str
    broken: bool
    note: str
    pictures: dict[str, str]
    """Data URIs by kind."""


def gallery(run: RunRecord) -> list[GalleryItem]:
    analysis = run.examined
    if analysis is None:
        return []
    names = analysis["names"]

    def prediction(output: Values) -> str:
        return f"{names[output['class']]} ({100 * output['sure']:.0f} %)"

    images = []
    for number, entry in enumerate(analysis["gallery"]):
        scale = f"shown magnified {0.5 / entry['highest']:.0f} times" if entry["highest"] else ""
        images.append(
            GalleryItem(
                label=names[entry["label"]],
                before=prediction(entry["clean"]),
                after=prediction(entry["adversarial"]),
                broken=entry["fell"],
                note=f"{analysis['threat']['norm']} distance {entry['distance']:.3g}, {scale}",
                pictures={
                    kind: run.picture(number, kind) for kind in ("clean", "change", "adversarial")
                },
            )
        )
    return images


def communication(runs: Sequence[RunRecord]) -> Table | None:
    """Bytes sent per worker and iteration, and the time spent on communication."""
    rows = []
    for run in runs:
        result: dict[str, Any] = run.result or {}
        if result.get("workers", 1) > 1:
            figures = [
                megabytes(result["mb_per_step"]),
                megabytes(result["mb_busiest"]),
                megabytes(result["mb_per_epoch"]),
                seconds(result["comm_seconds_per_epoch"]),
                seconds(result["exposed_seconds_per_epoch"]),
            ]
            bits = f"{result['bits']} ({result['quantizer']})"
            rows.append([run.name, str(result["workers"]), result["protocol"], bits, *figures])
    headers = ["Run", "Workers", "Protocol", "Bits", "Per iteration", "Busiest worker", "Per epoch"]
    headers += ["C", "Exposed"]
    note = f"{legend(headers)} Exposed: the part not overlapped with computation."
    return Table("Communication", headers, rows, note) if rows else None


def environment(runs: Sequence[RunRecord]) -> Table:
    """Versions and hardware."""
    keys = list(dict.fromkeys(key for run in runs for key in run.environment))

    def cell(value: object) -> str:
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    rows = [[key, *(cell(run.environment.get(key, NONE)) for run in runs)] for key in keys]
    return Table("Environment", ["", *(run.name for run in runs)], rows)
