"""Which operations may mix devices: the simulated device asked beside torch's fake tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from tests.devices import simulated

Operation = Callable[[Tensor, Tensor], object]
OPERATIONS: dict[str, Operation] = {
    "add": lambda x, y: x + y,
    "add in place": lambda x, y: x.clone().add_(y),
    "matmul": lambda x, y: x @ y.T,
    "concatenate": lambda x, y: torch.cat((x, y)),
    "stack": lambda x, y: torch.stack((x, y)),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "where by number": lambda x, y: torch.where(x > 0, x, y[0, 0]),
    "add number": lambda x, y: x + y.sum(),
    "multiply number": lambda x, y: x.sum() * y,
    "copy": lambda x, y: x.clone().copy_(y),
    "index": lambda x, y: x[y.argmax(0)],
    "put": lambda x, y: x.clone().index_put_((torch.zeros_like(x, dtype=torch.long)[0],), y[0]),
    "gather": lambda x, y: x.gather(0, y.argmax(0, keepdim=True)),
    "select": lambda x, y: x.index_select(0, y.argmax(0)),
    "lerp": lambda x, y: x.lerp(y, 0.5),
    "foreach": lambda x, y: torch._foreach_add([x], [y]),
    "minimum": torch.minimum,
    "cross entropy": lambda x, y: torch.nn.functional.cross_entropy(x, y.argmax(1)),
}


def compare() -> None:
    """Raise if the two disagree on an operation, in either order of the devices."""
    device = simulated.install()
    for name, operation in OPERATIONS.items():
        for order in ((device, torch.device("cpu")), (torch.device("cpu"), device), (device,) * 2):
            ours = works(operation, *order)
            with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True):
                theirs = works(operation, *order)
            assert ours == theirs, f"{name} of {order}: {ours}, torch: {theirs}"


def works(operation: Operation, first: torch.device, second: torch.device) -> bool:
    x, y = torch.ones(3, 3, device=first), torch.ones(3, 3, device=second)
    try:
        operation(x, y)
    except RuntimeError as error:
        if "device" not in str(error):
            raise
        return False
    return True
