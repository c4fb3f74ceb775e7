"""A bundle of a short evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from dat.data import ImageData
from dat.evaluation import Assessment, Bundle, assess
from tests.evaluation.cases import THREAT, short


@pytest.fixture(scope="session")
def written(
    model: nn.Module, small_data: ImageData, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Assessment]:
    """A bundle of two suites, and the evaluation that it is the evidence of."""
    path = tmp_path_factory.mktemp("bundle") / "evidence.dat"
    result = assess(model, small_data, [short(), "pgd-2"], threat=THREAT, check=False, bundle=path)
    return path, result


@pytest.fixture
def bundle(written: tuple[Path, Assessment]) -> Bundle:
    return Bundle.read(written[0])
