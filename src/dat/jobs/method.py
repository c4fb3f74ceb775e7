"""The name of a run's method, as in the paper's tables."""

from __future__ import annotations

from dat.attacks import FGSM, NFGSM, PGD, YOPO, Free, NoAttack
from dat.config.schema import RunConfig
from dat.objectives import MART, TRADES, Adversarial, GradAlign, LogitPairing, Noisy, Smooth
from dat.optim import LSGD, SGD, AdamW, MuonSettings

WITHOUT_LALR = SGD, AdamW, MuonSettings
AT_NAMES = {PGD: "AT", FGSM: "Fast AT", NFGSM: "N-FGSM", Free: "Free AT", YOPO: "YOPO"}
OBJECTIVE_NAMES = {TRADES: "TRADES", MART: "MART", LogitPairing: "ALP", GradAlign: "GradAlign"}


def method_name(config: RunConfig, workers: int) -> str:
    """The paper's name of the method: AT, Fast AT, DAT-PGD, DAT-FGSM w/o LALR, DAT-LSGD, ..."""
    if isinstance(config.objective, Noisy):
        return _noisy_name(config, workers)
    if isinstance(config.attack, NoAttack):
        return "Standard"
    plain = isinstance(config.objective, Adversarial)
    carried = ", carried" if isinstance(config.attack, PGD) and config.attack.carry else ""
    objective = "" if plain else f" {OBJECTIVE_NAMES.get(type(config.objective), 'own')}"
    awp = (" + AWP" if config.train.options.awp.gamma else "") + carried
    if workers == 1:
        return (AT_NAMES.get(type(config.attack), "AT") if plain else objective[1:]) + awp
    if isinstance(config.optimizer, LSGD):
        return f"DAT-LSGD{objective}{awp}"
    oracle = f"DAT-{type(config.attack).__name__}{objective}{awp}"
    return f"{oracle}{' w/o LALR' if isinstance(config.optimizer, WITHOUT_LALR) else ''}"


def _noisy_name(config: RunConfig, workers: int) -> str:
    assert isinstance(config.objective, Noisy)
    copies = f"N = {config.objective.copies}"
    if not isinstance(config.objective, Smooth):
        return f"Stability ({copies})"
    if isinstance(config.attack, NoAttack):
        return f"Gaussian ({copies})"
    return f"Smooth-{'AT' if workers == 1 else 'DAT'} ({copies})"
