"""What every test has in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

settings.register_profile(
    "quick",
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""The same examples every time, however busy the machine is."""
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=1500)
settings.load_profile("quick")

LONGEST = (
    "reproduce/test_studies.py",
    "faults/test_death.py",
    "test_examples.py",
    "test_export.py",
)
"""These files begin first: who gets a file has it to the end, and the others would wait."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        needs_triton = "triton_launch" in getattr(item, "fixturenames", ())
        if item.get_closest_marker("alone") or needs_triton:
            item.add_marker("slow")  # make test-slow installs Triton

    def place(item: pytest.Item) -> int:
        path = str(item.path)
        return next((n for n, it in enumerate(LONGEST) if path.endswith(it)), len(LONGEST))

    items.sort(key=place)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tensors here are small: more threads only wait for each other, on a busy machine for long."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def no_process_group() -> Iterator[None]:
    """No file finds the process group of another. `dat.evaluate` and `Trainer` join one where the
    caller has none, and leave it joined until the process ends."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def same_start() -> None:
    """What a file's fixtures draw does not depend on the files before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """Nor what a test draws on the tests before it: weights that nobody has seeded, above all."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Which data sets a user has fetched makes no difference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAT_DATA", str(tmp_path_factory.mktemp("cache")))
        yield
