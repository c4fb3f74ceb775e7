"""Steps 7 to 10 of Algorithm A1 for a model that is spread over the workers (FSDP2, `fully_shard`).

Between steps a worker has its part of every weight, gradient and moment. A block's weights are
gathered when it is computed; its gradient is summed and shared out as soon as it is complete.
"""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from dat.comm.base import BaseExchange
from dat.comm.message import Slot
from dat.comm.quantizer import Buckets, Quantizer
from dat.comm.routes import ring_bytes
from dat.comm.scatter import Gathering, Scattering
from dat.comm.shards import Shards, local_of, whole
from dat.comm.world import World
from dat.fields import SettingError
from dat.rng import derive

GATHER = ("attack", "block")


class ShardedExchange(BaseExchange):
    """`size` neighbouring workers have the model together.

    Where there are several such groups (HSDP), the sums of the groups are added up in floats.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        *,
        size: int,
        blocks: Sequence[nn.Module] = (),
        gather: str = "attack",
        quantizer: Quantizer | None = None,
        seed: int = 0,
        norms_meet: bool = False,
    ) -> None:
        super().__init__(module, world, norms_meet=norms_meet)
        _check(module)
        self.shards = Shards(world, size, self.ledger)
        self._quantizer, self._seed = quantizer or Buckets(), seed
        self._keeps = gather == "attack"
        self._key, self._passes = 0, 0
        self._between: Any = None
        self._skeleton = _skeleton(module)
        slots = _slots(module)
        for part in (*blocks, module):
            self._shard(part, slots)
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)
        if self._keeps:
            self._root.set_reshard_after_forward(False)

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    def _shard(self, part: nn.Module, slots: Mapping[int, Slot]) -> None:
        """Take the first worker's weights, and keep a part; of a model that is too large for a
        device, one block at a time is there."""
        mine = [p for p in part.parameters() if id(p) in slots]
        for parameter in mine:
            parameter.data = parameter.data.to(self.world.device).contiguous()
            dist.broadcast(parameter.data, 0)
        learnt = [slots[id(p)] for p in mine if p.requires_grad]
        fully_shard(part, mesh=self.shards.mesh)
        assert isinstance(part, FSDPModule)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
        part.set_custom_all_gather(Gathering(self.ledger, leaves=self.shards.leaves))  # type: ignore[arg-type]
        scattering = Scattering(
            learnt,
            self._quantizer,
            self.ledger,
            leaves=self.shards.leaves,
            key=lambda: self._key,
            done=self._scattered,
        )
        part.set_custom_reduce_scatter(scattering)  # type: ignore[arg-type]
        if self.shards.replicas > 1:
            part.set_all_reduce_hook(self._replicated)

    def _scattered(self) -> None:
        self._last_bucket = time.perf_counter()
        if self.shards.replicas > 1:  # torch adds up the replicas' sums next
            self._between = self.ledger.open_flight()

    def _replicated(self, summed: Tensor) -> None:
        sent = ring_bytes(summed, self.shards.replicas)
        self._between(sent, sent if self.world.leaves_node(self.world.size) else 0)
        if summed.device.type == "cpu":
            self.ledger.expose(time.perf_counter() - self._last_bucket)
        self._last_bucket = time.perf_counter()

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # where nobody says which step it is, passes are counted
            self._passes += 1
            self.begin(0, self._passes)
        logits: Tensor = self.module(x)
        return logits

    def begin(self, epoch: int, step: int) -> None:
        self._key = derive(self._seed, "quantize", epoch, step, self.world.rank)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """The gradient that adds up is the whole one, until it is sent."""
        self._root.set_requires_gradient_sync(False)
        try:
            with self.held():
                yield
        finally:
            self._root.set_requires_gradient_sync(True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Weights that were gathered stay, for the forward pass of the update as well."""
        self._root.set_reshard_after_backward(not self._keeps)
        try:
            yield
        finally:
            self._root.set_reshard_after_backward(True)

    def close(self) -> None:
        """Nothing: its groups end with the world, as the best weights may still be gathered."""

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        parts = [local_of(tensor) for tensor in tensors]
        squares = torch.stack(torch._foreach_norm(parts, 2, torch.float64)).square_()
        return self.shards.total(squares).sqrt_()

    def parted(self, state: Mapping[str, Tensor] | None = None) -> nn.Module:
        """A module with the model's weights as they are now, or others, each worker's parts of
        them: to be kept, not to be computed with."""
        return self._filled({k: v.clone() for k, v in (state or self._state()).items()})

    def whole(self, state: Mapping[str, Tensor] | None = None) -> nn.Module:
        """The same in whole, at every worker; all of them call this."""
        return self._filled({k: whole(v).clone() for k, v in (state or self._state()).items()})

    def _state(self) -> dict[str, Tensor]:
        return {name: value.detach() for name, value in self.module.state_dict().items()}

    def _filled(self, state: dict[str, Tensor]) -> nn.Module:
        module = copy.deepcopy(self._skeleton)
        module.load_state_dict(state, assign=True)
        own = dict(self.module.named_buffers())
        for name, buffer in module.named_buffers():
            if name not in state:  # of those that no state dict has
                buffer.data = own[name].detach().clone()
        return module.train(self.module.training)


def _check(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise SettingError(
                f"comm.shard: parameter {name} is a single number, which cannot be cut; give it "
                "the shape (1,), or use comm.shard = none"
            )
    kinds = {p.dtype for p in module.parameters() if p.requires_grad}
    if len(kinds) > 1:
        raise SettingError(
            f"comm.shard: the trained parameters are of {len(kinds)} types, must be of one; "
            "use comm.shard = none"
        )


def _skeleton(module: nn.Module) -> nn.Module:
    """The module without memory for its weights."""
    hollow = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    return copy.deepcopy(module, hollow)


def _slots(module: nn.Module) -> dict[int, Slot]:
    """Every parameter's place in the whole gradient."""
    found, position = {}, 0
    for parameter in module.parameters():
        found[id(parameter)] = Slot(tuple(parameter.shape), position)
        position += parameter.numel()
    return found
