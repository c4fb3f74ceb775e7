"""Imports timm and torchvision where torchvision's compiled operators do not fit this torch.

A torchvision of another build is imported with its operators declared but not defined, which its
classification networks do not need. Without any torchvision, timm gets stand-ins for the few names
that it imports. Call these functions in a process of its own: `in_fork` starts one.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

STAND_INS = {
    "torchvision": (),
    "torchvision.ops": (),
    "torchvision.ops.misc": ("FrozenBatchNorm2d",),
    "torchvision.transforms": (),
    "torchvision.transforms.functional": (),
    "torchvision.datasets": ("CIFAR100", "CIFAR10", "MNIST", "KMNIST", "FashionMNIST"),
    "torchvision.utils": (),
}


def import_torchvision() -> Any:
    """torchvision, or None if there is none."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    try:
        import torchvision
    except RuntimeError:  # the operators are missing
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        _declare_operators(Path(spec.origin).parent)
        import torchvision
    return torchvision


def import_timm() -> Any:
    """timm, with stand-ins for torchvision if there is none."""
    if import_torchvision() is None:
        for name, members in STAND_INS.items():
            module: Any = ModuleType(name)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="stand-in")
            module.__getattr__ = _stand_in
            for member in members:
                setattr(module, member, _stand_in(member))
            sys.modules[name] = module
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, module)
    import timm

    return timm


def _stand_in(name: str) -> type:
    """A class of this name; special names are missing, as in any module."""
    if name.startswith("__"):
        raise AttributeError(name)
    modes = ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
    return type(name, (torch.nn.Module,), {mode: mode for mode in modes})


_declared: list[torch.library.Library] = []


def _declare_operators(folder: Path) -> None:
    source = (folder / "_meta_registrations.py").read_text()
    names = set(re.findall(r"""register_meta\("(\w+)"\)""", source))
    names |= set(re.findall(r"""register_fake\("torchvision::(\w+)"\)""", source))
    library = torch.library.Library("torchvision", "DEF")
    for name in names:
        library.define(f"{name}(Tensor x) -> Tensor")
    _declared.append(library)


def in_fork(check: Callable[[], None]) -> None:
    """Run a check in a fork, so that what it imports does not stay; fail with its traceback, or
    skip if it does."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        text = b""
        try:
            check()
        except pytest.skip.Exception as skipped:
            text = b"skip:" + str(skipped).encode()
        except BaseException:  # reported by the parent
            text = traceback.format_exc().encode()
        finally:
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(text)
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if text.startswith(b"skip:"):
        pytest.skip(text.decode()[5:])
    assert not text, text.decode()
