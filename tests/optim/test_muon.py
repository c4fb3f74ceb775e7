"""Muon and AdamW against torch's, and Newton-Schulz against the singular value decomposition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dat.core.rng import generator
from dat.optim import LALR, AdamW, Muon, MuonDirection, muon
from dat.optim.orthogonal import COEFFICIENTS, flops, is_matrix, orthogonalize, rate_factor
from tests.optim.cases import assert_same, give_gradients, layers, train, weights_of


def linears(dtype: torch.dtype = torch.float32) -> nn.ParameterList:
    """Matrices: wide, tall, square."""
    random = generator(0, "matrices")
    shapes = (4, 7), (9, 3), (5, 5)
    return nn.ParameterList(torch.randn(shape, generator=random, dtype=dtype) for shape in shapes)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_bitwise_identical_to_torchs(adjust: str, nesterov: bool) -> None:
    """torch iterates in bfloat16."""
    mine, theirs = linears(), linears()
    options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    options |= {"nesterov": nesterov, "adjust_lr_fn": adjust}
    train(mine, Muon(mine.parameters(), precision="bfloat16", **options), range(5))
    train(theirs, torch.optim.Muon(theirs.parameters(), **options), range(5))
    assert_same(mine, theirs)


def test_muon_in_float32_agrees_with_torchs_up_to_bfloat16_rounding() -> None:
    mine, theirs = linears(), linears()
    before = weights_of(mine)
    train(mine, Muon(mine.parameters(), lr=0.02, adjust_lr_fn="original"), range(5))
    train(theirs, torch.optim.Muon(theirs.parameters(), lr=0.02, weight_decay=0.01), range(5))
    for one, two, start in zip(mine, theirs, before, strict=True):
        moved, expected = one.detach() - start, two.detach() - start
        assert 0 < float((moved - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("shape", [(4, 7), (9, 3), (5, 5), (2, 64)])
@pytest.mark.parametrize("steps", [1, 5])
def test_the_iterations_map_singular_values(shape: tuple[int, int], steps: int) -> None:
    """Each maps a singular value s to a s + b s^3 + c s^5, and keeps the singular vectors."""
    a, b, c = COEFFICIENTS
    matrix = torch.randn(shape, generator=generator(1, "matrix"), dtype=torch.float64)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(orthogonalize(matrix, steps=steps), left * values @ right)
    if steps == 5:
        assert float(values.min()) > 0.68 and float(values.max()) < 1.21


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert not orthogonalize(torch.zeros(3, 4)).any()


def test_convolutions_are_matrices_of_outputs_and_the_rest() -> None:
    conv = nn.Parameter(torch.randn(6, 2, 3, 3, generator=generator(0, "conv")))
    flat = nn.Parameter(conv.detach().flatten(1))
    models = nn.ParameterList([conv]), nn.ParameterList([flat])
    optimizers = [Muon(model.parameters(), lr=0.1) for model in models]
    for step in range(3):
        give_gradients(models[0], step)
        assert conv.grad is not None
        flat.grad = conv.grad.flatten(1)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(conv.flatten(1), flat)


def test_memory_format_changes_nothing() -> None:
    conv = torch.randn(6, 4, 3, 3, generator=generator(0, "conv"))
    models = [nn.ParameterList([conv.clone()]) for _ in range(2)]
    models[1][0].data = models[1][0].to(memory_format=torch.channels_last)
    for model in models:
        train(model, Muon(model.parameters(), lr=0.1), range(3))
    assert not models[1][0].is_contiguous()
    assert_same(*models)


@pytest.mark.parametrize("decay_1d", [True, False])
def test_other_parameters_are_updated_as_by_torchs_adamw(decay_1d: bool) -> None:
    mine, theirs = layers(torch.float32), layers(torch.float32)
    options: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    groups: list[dict[str, Any]] = [
        {"params": mine[:2], "orthogonalize": False},
        {"params": mine[2:], "lr": 0.02},
    ]
    train(mine, Muon(groups, lr=0.1, adamw_lr_ratio=0.5, decay_1d=decay_1d, **options), range(4))
    split: list[dict[str, Any]] = [
        {"params": theirs[:2], "lr": 0.05},
        {"params": theirs[2:], "lr": 0.01, "weight_decay": 0.1 if decay_1d else 0.0},
    ]
    train(theirs, torch.optim.AdamW(split, foreach=True, **options), range(4))
    assert_same(mine, theirs)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("decay_1d", [True, False])
def test_adamw_is_bitwise_identical_to_torchs(fused: bool, decay_1d: bool) -> None:
    mine, theirs = layers(torch.float32), layers(torch.float32)
    settings = AdamW(lr=0.1, betas=(0.8, 0.9), eps=1e-6, fused=fused, decay_1d=decay_1d)
    train(mine, settings(mine), range(4))
    groups: list[dict[str, Any]] = [
        {"params": theirs[:2]},
        {"params": theirs[2:], "weight_decay": 0.01 if decay_1d else 0.0},
    ]
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}
    train(theirs, torch.optim.AdamW(groups, fused=fused, foreach=not fused, **options), range(4))
    assert_same(mine, theirs)


class Transformer(nn.Module):
    """One of each kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2)
        self.tokens = nn.Embedding(5, 8)
        self.position = nn.Parameter(torch.zeros(1, 4, 8))
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10)


@pytest.mark.parametrize("head", ["adamw", "muon"])
def test_which_parameters_are_orthogonalized(head: str) -> None:
    model = Transformer()
    optimizer = Muon(head=head)(model)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator(0, "gradient"))
    optimizer.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = {names[id(parameter)]: set(state) for parameter, state in optimizer.state.items()}
    matrices = {name for name, state in states.items() if state == {"momentum_buffer"}}
    expected = {"patches.weight", "attention.in_proj_weight", "attention.out_proj.weight"}
    assert matrices == expected | ({"head.weight"} if head == "muon" else set())
    rest = [state for name, state in states.items() if name not in matrices]
    assert all(state == {"step", "exp_avg", "exp_avg_sq"} for state in rest)
    assert len(states) == len(names)


def test_rate_factors_agree_with_torchs() -> None:
    from torch.optim._muon import _adjust_lr

    for shape in ((4, 7), (9, 3), (6, 2, 3, 3)):
        param = torch.zeros(shape)
        for adjust in ("original", "match_rms_adamw"):
            expected = _adjust_lr(1.0, adjust, param.flatten(1).shape)
            assert rate_factor(param, adjust) == expected


def test_the_root_mean_square_of_an_update_is_adamws() -> None:
    """About 0.2, for `match_rms_adamw`, whatever the shape."""
    for shape in ((64, 64), (16, 256), (256, 16)):
        weight = nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape, generator=generator(0, "gradient"))
        Muon([weight], lr=1.0, weight_decay=0.0).step()
        assert 0.14 < float(weight.detach().square().mean().sqrt()) < 0.24


def test_lalr_over_muon() -> None:
    """The direction is Muon's update, which a layer's trust ratio scales."""
    model, other = linears(torch.float64), linears(torch.float64)
    before = weights_of(model)
    train(model, LALR(model.parameters(), MuonDirection(momentum=0.9), lr=0.1), range(1))
    direction = Muon(other.parameters(), lr=1.0, momentum=0.9, weight_decay=0.0)
    train(other, direction, range(1))
    for mine, theirs, start in zip(model, other, before, strict=True):
        u = theirs.detach() - start
        torch.testing.assert_close(mine.detach(), start + 0.1 * start.norm() / u.norm() * u)


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_every_matrix_has_an_owner_and_the_work_is_even(workers: int) -> None:
    costs = [5.0, 1.0, 9.0, 3.0, 3.0, 7.0, 2.0]
    owners = muon.share(costs, workers)
    work = [sum(c for c, o in zip(costs, owners, strict=True) if o == w) for w in range(workers)]
    assert len(owners) == len(costs) and max(work) <= max(max(costs), 4 / 3 * sum(costs) / workers)


def test_operations_are_counted() -> None:
    """Per iteration, X X^T and its product with X, and one product of the squares."""
    param = torch.zeros(8, 3, 2, 2)
    assert flops(param, 5) == 5 * (2 * 2 * 8 * 8 * 12 + 2 * 8**3)
    assert flops(param.flatten(1).T, 5) == flops(param, 5)
    assert is_matrix(param)


class Recorded:
    """Two workers, one after the other: the first run records what each sends."""

    def __init__(self, rank: int, sent: dict[int, Tensor]) -> None:
        self.rank, self.size, self.sent = rank, 2, sent

    def all_gather(self, values: Tensor) -> Tensor:
        self.sent[self.rank] = values.clone()
        return torch.stack([self.sent.get(rank, torch.zeros_like(values)) for rank in range(2)])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_workers_share_the_matrices(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    """Each sends the matrices it has computed; the step is the same bit for bit."""
    expected = linears()
    train(expected, Muon(expected.parameters(), lr=0.1, precision=precision), range(1))
    monkeypatch.setattr(muon, "WORTH_SHARING", 0.0)
    sent: dict[int, Tensor] = {}
    for rank in (0, 1, 0):
        model = linears()
        optimizer = Muon(model.parameters(), lr=0.1, precision=precision)
        optimizer.peers = Recorded(rank, sent)
        train(model, optimizer, range(1))
    assert_same(model, expected)
    assert sent[0].dtype == getattr(torch, precision)
    assert 0 < len(sent[0]) == len(sent[1]) < sum(p.numel() for p in model.parameters())


def test_small_matrices_are_not_shared() -> None:
    model = linears()
    optimizer = Muon(model.parameters(), lr=0.1)
    sent: dict[int, Tensor] = {}
    optimizer.peers = Recorded(0, sent)
    train(model, optimizer, range(1))
    assert not sent


def test_sparse_gradients_are_refused() -> None:
    model = nn.Embedding(4, 3, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="Muon needs dense gradients"):
        Muon(model.parameters()).step()
