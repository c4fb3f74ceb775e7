"""What every test has in common."""

from __future__ import annotations

import pytest
import torch

LONGEST = (
    "reproduce/test_studies.py",
    "faults/test_death.py",
    "test_examples.py",
    "test_export.py",
)
"""These files begin first: who gets a file has it to the end, and the others would wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        path = str(item.path)
        return next((n for n, it in enumerate(LONGEST) if path.endswith(it)), len(LONGEST))

    items.sort(key=place)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tensors here are small: more threads only wait for each other, on a busy machine for long."""
    torch.set_num_threads(1)
