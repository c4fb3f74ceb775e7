"""A small trained network, some digits, and a worker that is alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from dat.data import ImageData, load
from dat.distributed import World


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody else around, and no process group left behind."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def world(no_launcher: None) -> Iterator[World]:
    world = World.join(device="cpu")
    yield world
    world.close()


@pytest.fixture(scope="session")
def data() -> ImageData:
    return load("digits").test.take(torch.arange(150))


@pytest.fixture(scope="session")
def small_data(data: ImageData) -> ImageData:
    return data.take(torch.arange(60))


@pytest.fixture(scope="session")
def model() -> nn.Module:
    """A perceptron, trained on clean digits in a blink."""
    train = load("digits").train
    x, y = train.batch(torch.arange(len(train)), torch.device("cpu"))
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    random = torch.Generator().manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.1, generator=random)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return net
