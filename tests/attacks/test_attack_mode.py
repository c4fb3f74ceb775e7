"""The network during an attack."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dat.attacks import attack_mode


def modes(net: nn.Module) -> list[bool]:
    return [module.training for module in net.modules()]


@pytest.mark.parametrize("bn", ["eval", "train"])
@pytest.mark.parametrize("training", [True, False])
def test_every_module_has_the_mode_and_then_its_own(bn: str, training: bool) -> None:
    norm = nn.BatchNorm2d(2)
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.Sequential(norm, nn.Dropout())).train(training)
    norm.train(not training)
    before = modes(net)
    with attack_mode(net, bn):
        assert modes(net) == [bn == "train"] * 5
    assert modes(net) == before


def test_train_mode_uses_the_statistics_of_the_batch_and_keeps_the_running_ones() -> None:
    norm = nn.BatchNorm2d(1, momentum=None)  # a cumulative average, which counts its batches
    norm(torch.tensor([1.0, 3.0]).reshape(2, 1, 1, 1))
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    x = torch.tensor([10.0, 30.0]).reshape(2, 1, 1, 1)
    with attack_mode(norm, "train"):
        torch.testing.assert_close(norm(x).flatten(), torch.tensor([-1.0, 1.0]))
    assert before.keys() == norm.state_dict().keys()
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_statistics_keep_their_storage() -> None:
    norm = nn.BatchNorm2d(1)
    buffer = norm.running_mean
    with attack_mode(norm, "train"):
        norm(torch.rand(2, 1, 2, 2))
    assert norm.running_mean is buffer


def test_batch_norm_without_running_statistics_is_no_trouble() -> None:
    norm = nn.BatchNorm2d(1, track_running_stats=False)
    with attack_mode(norm, "train"):
        norm(torch.rand(2, 1, 2, 2))
    assert list(norm.buffers()) == []


def test_modes_nest() -> None:
    net = nn.Sequential(nn.BatchNorm2d(1)).train()
    with attack_mode(net, "eval"):
        with attack_mode(net, "train"):
            assert modes(net) == [True, True]
        assert modes(net) == [False, False]
    assert modes(net) == [True, True]


def test_modes_are_restored_after_an_exception() -> None:
    net = nn.Sequential(nn.BatchNorm2d(1)).train()
    net[0].eval()
    with pytest.raises(KeyboardInterrupt), attack_mode(net, "train"):
        raise KeyboardInterrupt
    assert modes(net) == [True, False]


def test_an_unknown_mode_is_refused() -> None:
    net = nn.BatchNorm2d(1).train()
    with (
        pytest.raises(ValueError, match="bn = 'Eval': must be 'eval' or 'train'"),
        attack_mode(net, "Eval"),
    ):
        pass
    assert net.training


def test_train_mode_keeps_the_running_statistics_of_instance_norm() -> None:
    norm = nn.InstanceNorm2d(1, track_running_stats=True)
    before = [buffer.clone() for buffer in norm.buffers()]
    with attack_mode(norm, "train"):
        norm(torch.arange(32.0).reshape(2, 1, 4, 4))
    assert all(map(torch.equal, norm.buffers(), before))
