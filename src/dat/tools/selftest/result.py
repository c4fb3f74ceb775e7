"""What a check gets, and what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from dat.core import devices
from dat.core.rng import derive

if TYPE_CHECKING:
    import torch

    from dat.distributed import World

PASS, FAIL, SKIP, INFO = "PASS", "FAIL", "SKIP", "INFO"
SEVERITY = (FAIL, SKIP, INFO, PASS)
"""The verdict of several workers is the first of these that one of them has."""
REPORT = "report it: attach this report to an issue"


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of a check on one worker, or on all of them."""

    verdict: str
    detail: str
    advice: str = ""
    """After a failure: what to do."""
    raised: bool = False
    """Whether it ended with an exception, so that collectives may be out of step."""
    secondary: bool = False
    """Whether that was a collective that ended in vain, so that another worker may be to blame."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Measurements for the report, as JSON types."""

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    def _severity(self) -> tuple[int, bool]:
        """Results in order, the worst first."""
        return SEVERITY.index(self.verdict), self.secondary

    @classmethod
    def of_workers(cls, results: Sequence[Self]) -> Self:
        """The common result: that of the first worker with the worst verdict, named if others
        have another one."""
        worst = min(results, key=cls._severity)
        severity = worst._severity()
        ranks = [rank for rank, result in enumerate(results) if result._severity() == severity]
        detail = worst.detail
        if len(ranks) < len(results):
            plural = "s" if len(ranks) > 1 else ""
            detail = f"worker{plural} {', '.join(map(str, ranks))}: {detail}"
        return cls(
            verdict=worst.verdict,
            detail=detail,
            advice=worst.advice,
            raised=any(result.raised for result in results),
            figures=results[0].figures if worst.verdict != FAIL else worst.figures,
        )


def passed(detail: str, **figures: Any) -> Result:
    return Result(verdict=PASS, detail=detail, figures=figures)


def failed(detail: str, /, advice: str = REPORT, **figures: Any) -> Result:
    return Result(verdict=FAIL, detail=detail, advice=advice, figures=figures)


def skipped(reason: str, **figures: Any) -> Result:
    return Result(verdict=SKIP, detail=reason, figures=figures)


def reported(detail: str, **figures: Any) -> Result:
    """Measurements without a verdict."""
    return Result(verdict=INFO, detail=detail, figures=figures)


@dataclass(frozen=True)
class Context:
    """What a check gets."""

    world: World
    seed: int = 0

    @property
    def device(self) -> torch.device:
        return self.world.device

    @cached_property
    def tf32(self) -> bool:
        """Whether float32 products may round their inputs to 10 bits."""
        return devices.is_accelerator(self.device) and devices.tf32_allowed()

    def tolerance(self, ieee: float, tf32: float) -> float:
        """The tolerance in the configured mode."""
        return tf32 if self.tf32 else ieee

    def key(self, purpose: str, *coordinates: int) -> int:
        return derive(self.seed, f"selftest {purpose}", *coordinates)

    def generator(self, purpose: str, *coordinates: int) -> torch.Generator:
        """A generator of the CPU: every worker can also generate the data of the others."""
        from dat.core.rng import generator

        return generator(self.seed, f"selftest {purpose}", *coordinates)

    @contextmanager
    def seeded(self, purpose: str) -> Iterator[None]:
        """Seed what layers on the CPU are initialized with, and restore it."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.key(purpose))
            yield

    def same_on_all_workers(self, digest: int) -> list[int]:
        """The ranks whose digest differs from that of rank 0; a collective."""
        import torch

        rows = self.world.gather(torch.tensor([digest], dtype=torch.int64)).flatten().tolist()
        return [rank for rank, other in enumerate(rows) if other != rows[0]]
