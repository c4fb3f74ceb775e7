"""What the page tells in words and tables; no markup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dat.report.page.gather import Told, Values

CLASSES = 20
"""With more classes the confusions are a list, not a square."""
WORST = 20
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
    """Rows that are to be seen at once."""


def percent(value: object) -> str:
    return f"{value:.1f} %" if isinstance(value, int | float) else NONE


def seconds(value: object) -> str:
    if not isinstance(value, int | float):
        return NONE
    if value >= 3600:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 120 else f"{value:.3g} s"


def megabytes(value: object) -> str:
    return f"{value:.3g} MB" if isinstance(value, int | float) else NONE


def tiles(told: Told) -> list[Tile]:
    """The figures that people ask for first."""
    result, last = told.result or {}, told.epochs[-1] if told.epochs else {}
    images = f"{result.get('images')} test images"
    found = [
        Tile("TA", percent(result.get("ta", last.get("holdout_ta"))), f"clean, {images}"),
        Tile("RA", percent(result.get("ra", last.get("holdout_ra"))), result.get("attack", "")),
    ]
    if not told.result:
        found = [Tile(it.name, it.value, "held-out images, so far") for it in found]
    if told.aa is not None:
        found.append(Tile("AA", percent(told.aa[0]), f"AutoAttack, {told.aa[1]} test images"))
    certified = told.newest("certify")
    if certified:
        for row in certified["ca"][:1]:
            note = (
                f"no l2 change up to {row['radius']:g} changes the smoothed answer, "
                f"{certified['images']} test images"
            )
            found.append(Tile("CA", percent(row["ca"]), note))
    if told.epochs:
        whole = sum(it["seconds"] for it in told.epochs)
        found.append(Tile("Training", seconds(whole), f"{len(told.epochs)} epochs"))
    if told.result and result.get("workers", 1) > 1:
        share = 100 * result["exposed_seconds_per_epoch"] / result["train_seconds_per_epoch"]
        found.append(Tile("Waiting", percent(share), "of the time, for the exchange"))
        found.append(Tile("Sent", megabytes(result["mb_per_step"]), "in an iteration, all workers"))
    return found


COMPARED: dict[str, Callable[[Told], str]] = {
    "TA": lambda it: percent((it.result or {}).get("ta")),
    "RA": lambda it: percent((it.result or {}).get("ra")),
    "AA": lambda it: percent(it.aa and it.aa[0]),
    "Best epoch": lambda it: str((it.result or {}).get("best_epoch", NONE)),
    "C an epoch": lambda it: seconds((it.result or {}).get("comm_seconds_per_epoch")),
    "T an epoch": lambda it: seconds((it.result or {}).get("train_seconds_per_epoch")),
    "Sent an iteration": lambda it: megabytes((it.result or {}).get("mb_per_step")),
}


def comparison(runs: Sequence[Told]) -> Table:
    """Runs side by side."""
    rows = [
        [it.name, (it.result or {}).get("method", NONE), *(make(it) for make in COMPARED.values())]
        for it in runs
    ]
    attacks = " and ".join(dict.fromkeys(str(it.result["attack"]) for it in runs if it.result))
    return Table("Runs", ["Run", "Method", *COMPARED], rows, note=f"RA: under {attacks}.")


def settings(runs: Sequence[Told]) -> Table:
    """Every setting; with several runs, those that differ are picked out and come first."""
    flat = [_flat(it.config) for it in runs]
    keys = list(dict.fromkeys(key for it in flat for key in it))
    rows = [[key, *(str(it.get(key, NONE)) for it in flat)] for key in keys]
    rows.sort(key=lambda row: len(set(row[1:])) == 1)
    picked = frozenset(n for n, row in enumerate(rows) if len(set(row[1:])) > 1)
    return Table("Settings", ["Setting", *(it.name for it in runs)], rows, picked=picked)


def _flat(values: Values, before: str = "") -> Values:
    found: Values = {}
    for key, value in values.items():
        found |= (
            _flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
        )
    return found


def classes(run: Told) -> Table | None:
    """Class by class."""
    it = run.examined
    if it is None:
        return None
    names, rows = it["names"], []
    for number, counts in enumerate(it["classes"]):
        if counts["images"]:
            share = 100 / counts["images"]
            taken = [[n, p] for t, p, n in it["confusions"] if t == number and p != number]
            often = f"{names[max(taken)[1]]} ({max(taken)[0]})" if taken else NONE
            accuracies = [percent(share * counts[key]) for key in ("right", "standing")]
            rows.append([names[number], str(counts["images"]), *accuracies, often])
    headers = ["Class", "Images", "TA", "RA", "Mostly taken for"]
    note = f"{it['images']} test images, {it['attack']}."
    return Table("Class by class", headers, rows, note)


@dataclass(frozen=True)
class Confusions:
    """How many images of each class (rows) were taken for which (columns) under attack."""

    names: Sequence[str]
    counts: Sequence[Sequence[int]]

    def share(self, row: int, column: int) -> float:
        return self.counts[row][column] / max(sum(self.counts[row]), 1)


def confusions(run: Told) -> Confusions | Table | None:
    """A square, or of many classes the most frequent mistakes."""
    it = run.examined
    if it is None:
        return None
    names = it["names"]
    if len(names) <= CLASSES:
        counts = [[0] * len(names) for _ in names]
        for true, said, number in it["confusions"]:
            counts[true][said] = number
        return Confusions(names, counts)
    worst = sorted((-n, t, p) for t, p, n in it["confusions"] if t != p)[:WORST]
    rows = [[names[t], names[p], str(-n)] for n, t, p in worst]
    return Table("Most frequent mistakes under attack", ["Class", "Taken for", "Images"], rows)


@dataclass(frozen=True)
class Shown:
    """An image of the gallery: what it is, what the model said before and after."""

    label: str
    before: str
    after: str
    fell: bool
    note: str
    pictures: dict[str, str]
    """Data URIs by kind."""


def gallery(run: Told) -> list[Shown]:
    it = run.examined
    if it is None:
        return []
    names = it["names"]

    def answer(said: Values) -> str:
        return f"{names[said['class']]} ({100 * said['sure']:.0f} %)"

    found = []
    for number, notes in enumerate(it["gallery"]):
        times = f"shown {0.5 / notes['highest']:.0f} times as strong" if notes["highest"] else ""
        found.append(
            Shown(
                label=names[notes["label"]],
                before=answer(notes["clean"]),
                after=answer(notes["adversarial"]),
                fell=notes["fell"],
                note=f"{it['threat']['norm']} distance {notes['distance']:.3g}, {times}",
                pictures={
                    kind: run.picture(number, kind) for kind in ("clean", "change", "adversarial")
                },
            )
        )
    return found


def communication(runs: Sequence[Told]) -> Table | None:
    """What the workers sent, and how long they waited for it."""
    rows = []
    for run in runs:
        it: dict[str, Any] = run.result or {}
        if it.get("workers", 1) > 1:
            figures = [
                megabytes(it["mb_per_step"]),
                megabytes(it["mb_busiest"]),
                megabytes(it["mb_per_epoch"]),
                seconds(it["comm_seconds_per_epoch"]),
                seconds(it["exposed_seconds_per_epoch"]),
            ]
            how = [str(it["workers"]), it["protocol"], f"{it['bits']} ({it['quantizer']})"]
            rows.append([run.name, *how, *figures])
    headers = ["Run", "Workers", "Protocol", "Bits", "An iteration", "Busiest worker", "An epoch"]
    note = "C: seconds an epoch with an exchange under way. Exposed: what of it nothing hid."
    return Table("Communication", [*headers, "C", "Exposed"], rows, note) if rows else None


def surroundings(runs: Sequence[Told]) -> Table:
    """Versions and machines."""
    keys = list(dict.fromkeys(key for run in runs for key in run.environment))

    def cell(value: object) -> str:
        return " ".join(map(str, value)) if isinstance(value, list) else str(value)

    rows = [[key, *(cell(run.environment.get(key, NONE)) for run in runs)] for key in keys]
    return Table("Environment", ["", *(run.name for run in runs)], rows)
