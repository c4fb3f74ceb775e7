"""How the future of a bucket is completed; tests/workers checks the sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from dat.distributed import Buckets, Chunked, Gather, Ledger, Protocol, Reducer, World, reducer
from dat.distributed.wire_format import Slot


@pytest.fixture
def completed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values that the reducer's futures are completed with."""
    values: list[Any] = []

    class RecordingFuture(Future[Tensor]):
        def set_result(self, result: Any) -> None:
            values.append(result)
            super().set_result(result)

    monkeypatch.setattr(reducer, "Future", RecordingFuture)
    return values


@pytest.mark.parametrize("protocol", [Gather(), Chunked()], ids=["gather", "chunked"])
def test_a_future_is_completed_with_the_gradient(completed: list[Any], protocol: Protocol) -> None:
    """On CUDA, waiting for a future synchronizes with the work on the tensors in its value: with a
    future of None the optimizer would read gradients that are still being summed."""
    gradient = torch.randn(8, generator=torch.Generator().manual_seed(0))
    with World.join(device="cpu", threads=1) as world:
        ledger = Ledger(world.device)
        sums = Reducer(Buckets(bits=8), protocol, world, length=8, ledger=ledger)
        total = sums.sum(0, gradient, [Slot((8,), 0)]).wait()
        sums.close()
    assert [value is gradient for value in completed] == [True]
    assert total.data_ptr() == gradient.data_ptr()
