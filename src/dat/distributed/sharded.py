"""Steps 7 to 10 of Algorithm A1 for a model that is sharded over the workers (FSDP2,
`fully_shard`).

Between steps a worker holds its shard of every weight, gradient and moment. The weights of a block
are all-gathered when it is computed; its gradient is reduce-scattered as soon as it is complete.
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

from dat.core import devices
from dat.core.rng import derive
from dat.core.settings import SettingError
from dat.distributed.base import BaseExchange
from dat.distributed.quantizers import Buckets, Quantizer
from dat.distributed.scatter import AllGather, ReduceScatter
from dat.distributed.shards import Shards, full_tensor, local_tensor
from dat.distributed.traffic import ring_bytes
from dat.distributed.wire_format import Slot
from dat.distributed.world import World


class ShardedExchange(BaseExchange):
    """The gradient exchange of a model that is sharded over `size` consecutive ranks.

    With several such groups (HSDP), the sums of the groups are all-reduced in float32.
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
        synchronized_batch_norm: bool = False,
    ) -> None:
        super().__init__(module, world, synchronized_batch_norm=synchronized_batch_norm)
        _check(module)
        self._shards = Shards(world, size, self.ledger)
        self._quantizer, self._seed = quantizer or Buckets(), seed
        self._keep_weights = gather == "attack"
        self._key, self._forward_passes = 0, 0
        self._finish_all_reduce: Any = None
        self._meta_module = _on_meta(module)
        slots = _slots(module)
        for submodule in (*blocks, module):
            self._shard(submodule, slots)
        for buffer in module.buffers():
            dist.broadcast(buffer, 0)
        if self._keep_weights:
            self._root.set_reshard_after_forward(False)

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.module, FSDPModule)
        return self.module

    def _shard(self, module: nn.Module, slots: Mapping[int, Slot]) -> None:
        """Broadcast the first worker's weights, and keep a shard. Blocks are sharded one by one, so
        that only one of them is on the device as a whole."""
        parameters = [p for p in module.parameters() if id(p) in slots]
        for parameter in parameters:
            parameter.data = parameter.data.to(self.world.device).contiguous()
            dist.broadcast(parameter.data, 0)
        trained = [slots[id(p)] for p in parameters if p.requires_grad]
        fully_shard(module, mesh=self.shards.mesh)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        all_gather = AllGather(self.ledger, crosses_nodes=self.shards.spans_nodes)
        module.set_custom_all_gather(all_gather)  # type: ignore[arg-type]
        reduce_scatter = ReduceScatter(
            trained,
            self._quantizer,
            self.ledger,
            crosses_nodes=self.shards.spans_nodes,
            key=lambda: self._key,
            unscale=self.unscale,
            done=self._after_reduce_scatter,
        )
        module.set_custom_reduce_scatter(reduce_scatter)  # type: ignore[arg-type]
        if self.shards.replicas > 1:
            module.set_all_reduce_hook(self._after_all_reduce)

    def _after_reduce_scatter(self) -> None:
        self._last_bucket = time.perf_counter()
        if self.shards.replicas > 1:  # torch all-reduces over the replicas next
            self._finish_all_reduce = self.ledger.start_transfer()

    def _after_all_reduce(self, summed: Tensor) -> None:
        sent = ring_bytes(summed.nbytes, self.shards.replicas)
        self._finish_all_reduce(sent, sent if self.world.spans_nodes(self.world.size) else 0)
        if not devices.is_accelerator(summed.device):
            self.ledger.add_exposed(time.perf_counter() - self._last_bucket)
        self._last_bucket = time.perf_counter()

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # number the passes, for callers that do not call `begin`
            self._forward_passes += 1
            self.begin(0, self._forward_passes)
        logits: Tensor = self.module(x)
        return logits

    def begin(self, epoch: int, step: int) -> None:
        self._key = derive(self._seed, "quantize", epoch, step, self.world.rank)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication; until the next sync they are unsharded."""
        self._root.set_requires_gradient_sync(False)
        try:
            with self.keep_gathered():
                yield
        finally:
            self._root.set_requires_gradient_sync(True)

    @contextmanager
    def keep_gathered(self) -> Iterator[None]:
        """Keep gathered weights, for the forward pass of the update as well."""
        self._root.set_reshard_after_backward(not self._keep_weights)
        try:
            yield
        finally:
            self._root.set_reshard_after_backward(True)

    def close(self) -> None:
        """Does nothing: the best weights may still have to be gathered, so the process groups live
        as long as the world."""

    def norms(self, tensors: Sequence[Tensor]) -> Tensor:
        local = [local_tensor(tensor) for tensor in tensors]
        squares = torch.stack(torch._foreach_norm(local, 2, torch.float64)).square_()
        return self.shards.total(squares).sqrt_()

    @property
    def shards(self) -> Shards:
        return self._shards

    def any_worker(self, flags: Tensor) -> Tensor:
        return self.shards.total(flags.float()) > 0

    def shard_copy(self, model: nn.Module) -> nn.Module:
        """A copy for storage only: it cannot be run."""
        return self._with_state({k: v.detach().clone() for k, v in model.state_dict().items()})

    def unsharded_model(self, model: nn.Module) -> nn.Module:
        state = model.state_dict().items()
        return self._with_state(
            {name: full_tensor(value.detach()).clone() for name, value in state}
        )

    def _with_state(self, state: dict[str, Tensor]) -> nn.Module:
        module = copy.deepcopy(self._meta_module)
        module.load_state_dict(state, assign=True)
        buffers = dict(self.module.named_buffers())
        for name, buffer in module.named_buffers():
            if name not in state:  # non-persistent
                buffer.data = buffers[name].detach().clone()
        return module.train(self.module.training)


def _check(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise SettingError(
                f"comm.shard: parameter {name} is a scalar, which cannot be sharded; give it the "
                "shape (1,), or use comm.shard = none"
            )
    dtypes = {p.dtype for p in module.parameters() if p.requires_grad}
    if len(dtypes) > 1:
        raise SettingError(
            f"comm.shard: the trained parameters must have one dtype, not {len(dtypes)}; "
            "use comm.shard = none"
        )


def _on_meta(module: nn.Module) -> nn.Module:
    """A copy of the module with its parameters on the meta device, which take no memory."""
    replacements = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
        for p in module.parameters()
    }
    return copy.deepcopy(module, replacements)


def _slots(module: nn.Module) -> dict[int, Slot]:
    """The place of each parameter in the whole gradient, by the parameter's id."""
    slots, position = {}, 0
    for parameter in module.parameters():
        slots[id(parameter)] = Slot(tuple(parameter.shape), position)
        position += parameter.numel()
    return slots
