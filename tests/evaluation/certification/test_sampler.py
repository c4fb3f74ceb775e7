"""The noise: what it is, and what it does not depend on."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from dat.data import ImageData
from dat.evaluation.certification.sampler import BLOCK, NoiseSampler, SampleRange

CPU = torch.device("cpu")


class Record(nn.Module):
    """Keeps what it is shown; answers 0, 1, 2 by the size of the first pixel's noise."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shown.append(x.clone())
        first = x[:, 0, 0, 0] - 0.5
        return torch.stack((-first, torch.zeros_like(first), first), dim=1)


def images(count: int) -> ImageData:
    return ImageData.of(torch.full((count, 3, 2, 5), 0.5), torch.zeros(count, dtype=torch.int64))


def sampler(net: nn.Module, *, batch: int = 64, seed: int = 0) -> NoiseSampler:
    return NoiseSampler(net, images(4), sigma=0.3, classes=3, device=CPU, batch=batch, seed=seed)


def test_noise_is_gaussian_with_the_given_deviation() -> None:
    net = Record()
    sampler(net).count("estimate", [SampleRange(0, 0, 1000), SampleRange(1, 0, 1000)])
    noise = torch.cat(net.shown) - 0.5
    assert noise.shape == (2000, 3, 2, 5)
    assert stats.kstest(noise.flatten() / 0.3, "norm").pvalue > 0.01
    among = torch.corrcoef(noise.flatten(1).T) - torch.eye(30)  # pixels are independent
    assert among.abs().max() < 5 / 2000**0.5


def test_no_two_samples_share_their_noise() -> None:
    net = Record()
    made = sampler(net)
    made.count("estimate", [SampleRange(0, 0, 200), SampleRange(1, 0, 200)])
    made.count("select", [SampleRange(0, 0, 200)])
    assert len(torch.cat(net.shown).flatten(1).unique(dim=0)) == 600


def test_another_seed_draws_other_noise() -> None:
    nets = Record(), Record(), Record()
    for net, seed in zip(nets, (0, 1, 0), strict=True):
        sampler(net, seed=seed).count("estimate", [SampleRange(2, 0, BLOCK)])
    first, other, again = (net.shown[0] for net in nets)
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("batch", [1, 32, 96, 1000])
def test_counts_do_not_depend_on_the_batch_or_on_who_else_is_asked_for(batch: int) -> None:
    asked = [SampleRange(0, 0, 130), SampleRange(3, 64, 300), SampleRange(1, 0, 1)]
    expected = sampler(Record()).count("estimate", asked)
    assert expected.sum(1).tolist() == [130, 236, 1]
    assert torch.equal(sampler(Record(), batch=batch).count("estimate", asked), expected)
    alone = torch.cat([sampler(Record()).count("estimate", [request]) for request in asked])
    assert torch.equal(alone, expected)


def test_samples_may_be_drawn_bit_by_bit() -> None:
    whole = sampler(Record()).count("estimate", [SampleRange(1, 0, 500)])
    made = sampler(Record())
    cuts = [0, 1, 32, 33, 100, 320, 500]
    parts = [made.count("estimate", [SampleRange(1, low, high)]) for low, high in pairwise(cuts)]
    assert torch.equal(torch.stack(parts).sum(0), whole)


def test_an_answer_that_is_no_number_counts_for_no_class() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            logits = torch.tensor([0.0, 1.0, 0.0]).repeat(len(x), 1)
            logits[::2] = torch.nan
            return logits

    assert sampler(Broken()).count("estimate", [SampleRange(0, 0, 64)]).tolist() == [[0, 32, 0]]


def test_the_batch_is_measured_unless_it_is_given() -> None:
    made = NoiseSampler(Record(), images(1), sigma=0.3, classes=3, device=CPU)
    assert made.batch % BLOCK == 0 and BLOCK <= made.batch <= 1024
    assert sampler(Record(), batch=100).batch == 128


def test_the_network_is_sampled_in_eval_mode_and_left_as_it_was() -> None:
    class Mode(Record):
        def forward(self, x: Tensor) -> Tensor:
            assert not self.training
            return super().forward(x)

    net = Mode().train()
    sampler(net).count("estimate", [SampleRange(0, 0, 10)])
    assert net.training
