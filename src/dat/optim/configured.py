"""Optimizers of ours: a `torch.optim.Optimizer` with parameters, its settings without."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterable
from inspect import Parameter, Signature
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from dat.optim.base import OptimizerSettings


class Configured(torch.optim.Optimizer):
    """Base class of optimizers whose options are settings.

    `LAMB(params, lr=0.05)` is an optimizer. `LAMB(lr=0.05)` has no parameters to optimize yet: it
    is a `LAMBSettings`, which a `Trainer` calls with its model. A class declares the two signatures
    of its `__new__` for type checkers, and has no `__init__`, which they would look at instead.
    """

    settings: ClassVar[type[OptimizerSettings]]
    """Defines, documents and validates the options."""
    settings_only: ClassVar[tuple[str, ...]] = ("clip",)
    """Settings that are no options, as they need more than parameters."""

    __signature__: ClassVar[Signature]

    def __new__(cls, *args: Any, **options: Any) -> Any:
        if args or "params" in options or "settings" not in vars(cls):
            return super().__new__(cls)
        return cls.settings(**options)  # not an instance, so Python does not call __init__

    def __init__(self, params: ParamsT, lr: float | Tensor | None = None, **options: Any) -> None:
        if wrong := [name for name in self.settings_only if name in options]:
            raise TypeError(
                f"{type(self).__name__}: {wrong[0]} is a setting, not an option of an optimizer "
                f"with parameters{'; call torch.nn.utils.clip_grad_norm_' * ('clip' in wrong)}"
            )
        settings = self.settings(**options if lr is None else {"lr": float(lr), **options})
        self._configure(params, settings.lr if lr is None else lr, settings)

    @abstractmethod
    def _configure(self, params: ParamsT, lr: float | Tensor, settings: Any) -> None:
        """Call `__init__` of the optimizer's other base class, with the validated settings."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "settings" in vars(cls):
            cls.__signature__ = Signature(list(cls._parameters()))

    def __getnewargs__(self) -> tuple[Any, ...]:
        return ((),)  # copy and pickle call __new__, which must not return settings

    @classmethod
    def of(cls, settings: OptimizerSettings, params: ParamsT) -> Self:
        """The optimizer with these settings."""
        return cls(params, **{name: getattr(settings, name) for name in cls._option_names()})

    @classmethod
    def _option_names(cls) -> Iterable[str]:
        fields = dataclasses.fields(cls.settings)
        return (field.name for field in fields if field.name not in cls.settings_only)

    @classmethod
    def _parameters(cls) -> Iterable[Parameter]:
        """The signature that `help` shows: all options, with their defaults."""
        defaults = cls.settings()
        yield Parameter("params", Parameter.POSITIONAL_OR_KEYWORD)
        yield Parameter("lr", Parameter.POSITIONAL_OR_KEYWORD, default=defaults.lr)
        for name in cls._option_names():
            if name != "lr":
                yield Parameter(name, Parameter.KEYWORD_ONLY, default=getattr(defaults, name))


def fill_missing(state: dict[str, Any], own: Iterable[dict[str, Any]]) -> None:
    """Complete the parameter groups of a loaded state by options that it lacks, because an older
    version saved it, with those of the optimizer's own groups."""
    for group, current in zip(state["param_groups"], own, strict=True):
        for name, value in current.items():
            group.setdefault(name, value)
