"""Quantizers and protocols by name, checked before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence

from dat.core.settings import SettingError
from dat.distributed import CONCRETE_PROTOCOLS, QUANTIZERS
from dat.distributed.quantizers import Quantizer


def make_quantizer(name: str, bits: int) -> Quantizer:
    if name not in QUANTIZERS:
        raise SettingError(f"quantizer {name!r}: must be one of {', '.join(QUANTIZERS)}")
    return QUANTIZERS[name].read({"bits": bits}, "quantizer")


def check_protocols(names: Sequence[str]) -> None:
    for name in names:
        if name not in CONCRETE_PROTOCOLS:
            known = ", ".join(CONCRETE_PROTOCOLS)
            raise SettingError(f"protocol {name!r}: must be one of {known}")
