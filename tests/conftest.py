"""What every test has in common."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tensors here are small: more threads only wait for each other, on a busy machine for long."""
    torch.set_num_threads(1)
