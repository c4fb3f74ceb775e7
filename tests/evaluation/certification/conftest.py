"""The worker that is alone, and a classifier whose certified radius is known."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dat.data import ImageData
from tests.evaluation.certification.cases import Plane
from tests.evaluation.conftest import data, model, no_launcher, world

__all__ = ["data", "model", "no_launcher", "world"]


@pytest.fixture
def plane() -> nn.Module:
    return Plane()


@pytest.fixture
def spread() -> ImageData:
    """Images at distances 0, 0.02, 0.04, ... from the plane, all of class 1."""
    distances = torch.arange(40) * 0.02
    return ImageData.of(Plane().at(distances), torch.ones(40, dtype=torch.int64), classes=2)
