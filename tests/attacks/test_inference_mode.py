"""Attacks inside `torch.inference_mode`, where torch itself has no gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dat.attacks import PGD, AttackTarget, attack_mode
from dat.core.threat import ThreatModel
from tests.attacks.cases import images

THREAT = ThreatModel(eps=0.1)


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 10)
        ).eval()


def batch() -> tuple[Tensor, Tensor]:
    return images((6, 1, 4, 4)), torch.arange(6)


def attacked(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """With torch's own loss, which keeps the labels for the backward pass."""
    return PGD(steps=3)(lambda z: F.cross_entropy(net(z).float(), y, reduction="none"), x, THREAT)


def test_a_loss_of_torch_on_labels_made_there() -> None:
    net = network()
    expected = attacked(net, *batch())
    with torch.inference_mode():
        x, y = batch()
        assert x.is_inference() and y.is_inference()
        assert torch.equal(attacked(net, x, y), expected)


def test_a_network_made_there() -> None:
    expected = attacked(network(), *batch())
    with torch.inference_mode():
        net = network()
        with attack_mode(net):
            assert torch.equal(attacked(net, *batch()), expected)


def test_images_made_there_and_attacked_outside() -> None:
    net = network()
    expected = PGD(steps=3)(AttackTarget(net, batch()[1]), batch()[0], THREAT)
    with torch.inference_mode():
        x, y = batch()
    assert torch.equal(PGD(steps=3)(AttackTarget(net, y), x, THREAT), expected)
    assert torch.equal(PGD(steps=3)(AttackTarget(net, y), batch()[0], THREAT), expected)


def test_under_autocast_whose_cache_has_weights_made_there() -> None:
    net = network()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = attacked(net, *batch())
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        net(batch()[0])
        assert torch.equal(attacked(net, *batch()), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of torch's own tracing
def test_a_compiled_network() -> None:
    net, compiled = network(), torch.compile(network(), backend="eager")
    expected = attacked(net, *batch())
    with torch.inference_mode():
        assert torch.equal(attacked(compiled, *batch()), expected)  # type: ignore[arg-type]


def test_a_loss_that_overwrites_a_tensor_made_there_is_refused() -> None:
    """Autograd needs a copy, and what the loss writes into the copy would be lost."""
    net = network()
    with torch.inference_mode():
        calls = torch.zeros(())

        def counted(z: Tensor) -> Tensor:
            calls.add_(1)
            losses: Tensor = net(z).sum(1)
            return losses

        with pytest.raises(RuntimeError, match="clone it inside the loss"):
            PGD()(counted, batch()[0], THREAT)
