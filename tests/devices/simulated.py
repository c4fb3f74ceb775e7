"""An accelerator without hardware: torch's PrivateUse1 device, with its values in host memory.

A tensor of the device wraps a CPU tensor. An operation checks that its tensors are on one device,
by torch's rules, and computes on the wrapped tensors. So results can be compared with the CPU's,
and code whose control flow depends on values runs as well. What would make the host wait for a GPU
is counted. Everything is done at once: nothing here tells whether streams are ordered.

`install` changes the whole process for good; call it only in a process of its own.
"""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

import dat

KIND = "simulated"
SOURCE = f"{Path(dat.__file__).parent}/"
MEMORY = 1 << 30
aten = torch.ops.aten

COPY = aten._to_copy.default
COPY_INTO = (aten.copy_.default, aten._foreach_copy_.default)
INDEXING = (
    *(aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default),
    *(aten.index_put_.default, aten._index_put_impl_.default, aten._unsafe_index_put.default),
)
"""Operations whose indices may be in host memory."""
WAITING = {
    *(aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.bincount),
    *(aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave),
}
"""Operations whose result, or its shape, the host has to wait for. Indexing with a mask calls
`nonzero` inside a GPU's kernel, so it waits as well."""
CAST = (aten.linear, aten.conv2d, aten.matmul, aten.mm, aten.addmm, aten.bmm)
"""Operations that autocast computes in low precision."""

waits: Counter[str] = Counter()
"""How often the host has waited for the device, by the function of ours that made it wait."""


on_operation: list[Callable[[], object]] = []
"""Called before every operation on the device."""


class DeviceMismatch(RuntimeError):
    """An operation on tensors of several devices."""


class SimulatedTensor(Tensor):
    """A tensor on the device."""

    values: Tensor  # type: ignore[assignment]  # sparse tensors have a method of this name

    @staticmethod
    def __new__(cls, values: Tensor) -> SimulatedTensor:
        make: Any = torch.Tensor._make_wrapper_subclass
        with torch.inference_mode(False):  # a view may be of a tensor from outside
            tensor: SimulatedTensor = make(
                cls,
                values.shape,
                strides=values.stride(),
                storage_offset=values.storage_offset(),
                dtype=values.dtype,
                device=torch.device(KIND, 0),
            )
        tensor.values = values
        return tensor

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(function, args, kwargs or {})

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.values})"

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:  # torch's own copies the storage, which is empty
            memo[id(self)] = copied = self.detach().clone(memory_format=torch.preserve_format)
            copied.requires_grad_(self.requires_grad)
            vars(copied).update({k: v for k, v in vars(self).items() if k != "values"})
            copied.grad = copy.deepcopy(self.grad, memo)
        known: Tensor = memo[id(self)]
        return known

    def tolist(self) -> Any:  # torch refuses it for subclasses
        record_wait()
        return self.values.detach().tolist()


class Interpreter(TorchDispatchMode):
    """Also handles functions without a tensor among their arguments, which create one."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it computes on its shard first
        return compute(function, args, kwargs or {})


def compute(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Check the devices of an operation, and compute it in host memory."""
    flat, spec = tree_flatten((args, kwargs))
    target = kwargs.get("device")
    creates = target is not None and torch.device(target).type == KIND
    if not creates and not any(isinstance(value, SimulatedTensor) for value in flat):
        return function(*args, **kwargs)
    for call in on_operation:
        call()
    check_devices(function, args, flat)
    to_host = target is not None and not creates
    into_host = function in COPY_INTO and not _any_simulated(args[0])
    if to_host or into_host or _waits(function, args, kwargs):
        record_wait()
    args_, kwargs_ = tree_unflatten([_on_host(value) for value in flat], spec)
    kwargs_.pop("pin_memory", None)
    result = function(*args_, **kwargs_)
    if to_host:
        return result
    if into_host:
        return args[0]
    result = tree_map_only(Tensor, SimulatedTensor, result)
    if torch.is_inference_mode_enabled() and not function._schema.is_mutable:
        return result  # autograd asks nobody there whether two tensors share memory
    return return_and_correct_aliasing(function, args, kwargs, result)


def _any_simulated(value: Any) -> bool:
    return any(isinstance(leaf, SimulatedTensor) for leaf in tree_flatten(value)[0])


def _on_host(value: Any) -> Any:
    if isinstance(value, SimulatedTensor):
        return value.values
    simulated = isinstance(value, torch.device) and value.type == KIND
    return torch.device("cpu") if simulated else value


def _waits(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for the device: also in copies from pageable memory that may not run
    in the background, as in `torch.tensor(..., device=...)`."""
    if function in INDEXING:
        indices = [index for index in args[1] if index is not None]
        return any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    if function is COPY:
        return not isinstance(args[0], SimulatedTensor) and not kwargs.get("non_blocking")
    if function is aten.copy_.default:
        background = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
        return not isinstance(args[1], SimulatedTensor) and args[1].dim() > 0 and not background
    return function._overloadpacket in WAITING


def check_devices(function: Any, args: Any, flat: list[Any]) -> None:
    """Raise if an operation mixes devices. Numbers (tensors without dimensions) may come from the
    host, and so may indices; copies are there to mix devices."""
    if function is COPY or function in COPY_INTO:
        return
    if function in INDEXING:
        flat = [args[0], *args[2:3]]
    tensors = [value for value in flat if isinstance(value, Tensor)]
    kinds = {t.device.type for t in tensors if t.dim() or isinstance(t, SimulatedTensor)}
    if len(kinds) > 1:
        raise DeviceMismatch(
            f"{function}: tensors on several devices, {' and '.join(sorted(kinds))}"
        )


def record_wait() -> None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCE):
        frame = frame.f_back
    if frame is not None:
        waits[name_of(frame.f_code)] += 1


def name_of(code: CodeType) -> str:
    """A function of ours by its file and its name in it."""
    return f"{code.co_filename.removeprefix(SOURCE)}:{code.co_qualname}"


class Event:
    """Stands for `torch.Event`: everything before it is done."""

    def __init__(self, device: torch.device | None = None, *, enable_timing: bool = False) -> None:
        assert device is None or device.type == KIND
        self.timed, self.time = enable_timing, 0.0

    def record(self, stream: object = None) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        record_wait()

    def elapsed_time(self, end: Event) -> float:
        assert self.timed and end.timed
        return 1e3 * (end.time - self.time)


class Stream:
    """Stands for the streams of FSDP: everything before is done."""

    def __init__(self, **_: object) -> None:
        self.device = torch.device(KIND, 0)

    def record_event(self) -> Event:
        return Event(self.device)

    def wait_event(self, event: Event) -> None:
        pass

    wait_stream = wait_event


class Generator(torch.Generator):
    """Stands for `torch.Generator`: those of the device draw the CPU's numbers."""

    def __new__(cls, device: object = "cpu") -> Generator:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


class Module:
    """What `torch.get_device_module` returns. The device shares the CPU's generator, so that both
    draw the same numbers."""

    def is_initialized(self) -> bool:
        return True

    is_available = is_initialized

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: object) -> Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: Tensor, device: object) -> None:
        torch.default_generator.set_state(state)

    def current_stream(self, device: object = None) -> Stream:
        return Stream()

    def stream(self, stream: Stream) -> Any:
        return nullcontext()

    @property
    def Stream(self) -> type[Stream]:
        return Stream

    @property
    def Event(self) -> type[Event]:
        return Event

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class Memory:
    """Stands for the memory functions of `torch.accelerator`, which need an allocator in C++."""

    def get_memory_info(self, device: object) -> tuple[int, int]:
        return MEMORY, MEMORY

    def memory_allocated(self, device: object) -> int:
        return 0

    max_memory_allocated = memory_allocated

    def reset_peak_memory_stats(self, device: object) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device: object) -> None:
        record_wait()


def install() -> torch.device:
    """Make this the accelerator of the process, for good."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(KIND, backend_module=Module())
    make = torch.tensor

    def tensor(*args: Any, **kwargs: Any) -> Tensor:
        torch._C._set_only_lift_cpu_tensors(True)
        return make(*args, **kwargs)

    torch.tensor = tensor
    torch.Event = Event  # type: ignore[assignment, misc]
    memory = Memory()
    for name in (n for n in dir(memory) if not n.startswith("_")):
        setattr(torch.accelerator, name, getattr(memory, name))
    torch.Generator = Generator  # type: ignore[misc]
    of_host = torch.futures.Future.__init__  # with devices, it takes streams from a pool in C++
    torch.futures.Future.__init__ = lambda self, *, devices=None: of_host(self)  # type: ignore[method-assign]
    torch.compile = lambda function, **_: function  # type: ignore[assignment]  # no code for it
    for name in ("alloc_storage", "free_storage"):  # the wrappers have none
        setattr(_fsdp_param, name, lambda tensor: None)
    dist.Backend.backend_capability["gloo"].append(KIND)
    dist.Backend.default_device_backend_map[KIND] = "gloo"
    _install_autocast()
    interpreter: Any = Interpreter()  # type: ignore[no-untyped-call]
    interpreter.__enter__()
    return torch.device(KIND, 0)


def _install_autocast() -> None:
    library = torch.library.Library("_", "IMPL")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    kept.append(library)
    library = torch.library.Library("aten", "IMPL")
    kept.append(library)
    keys: Any = torch._C.DispatchKey
    key = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)
    for packet in CAST:

        def cast(*args: Any, _function: Any = packet.default, **kwargs: Any) -> Any:
            dtype = torch.get_autocast_dtype(KIND)
            lower = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
            with torch._C._ExcludeDispatchKeyGuard(key):
                return _function(*tree_map_only(Tensor, lower, args), **kwargs)

        library.impl(packet.default.name(), cast, "AutocastPrivateUse1")


kept: list[Any] = []
"""A library's registrations end with it."""
