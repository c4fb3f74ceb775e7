"""How often a run saves checkpoints, and how many it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from dat.core.settings import setting
from dat.train.part import Option


@dataclass(frozen=True, kw_only=True)
class Checkpointing(Option):
    """The settings of `dat.train.Checkpointer`."""

    every: int = setting(
        0,
        "steps between checkpoints, besides the one after each epoch; 0: only that one",
        ge=0,
        key="save_every",
    )
    keep: int = setting(
        2, "number of latest checkpoints to keep, besides the best", ge=1, key="save_keep"
    )
