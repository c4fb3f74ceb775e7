"""Bundles that were changed by somebody who seals them again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from dat.evaluation import Assessment
from dat.evaluation.bundle import container

Written = tuple[Path, Assessment]
Tensors = dict[str, Tensor]


def forged(written: Written, out: Path, change: Callable[[Any, Tensors], None]) -> Path:
    contents = container.read(written[0])
    claim, tensors = copy.deepcopy(contents.claim), dict(contents.tensors)
    change(claim, tensors)
    path = out / "forged"
    container.write(path, claim, tensors)
    return path
