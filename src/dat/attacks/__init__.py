"""Attacks: they maximize the loss within the threat model, step 5 of Algorithm A1.

An attack takes a closure `x -> per-example loss`, a batch, a threat model and the batch's random
streams. One that needs to know which images are misclassified (FAB, targeted APGD) takes an
`AttackTarget`, a loss with the network and the labels. To add an attack: a file here, a line below.
"""

from typing import TYPE_CHECKING

from dat.attacks.apgd import APGD, TargetedAPGD
from dat.attacks.base import Attack, Targeted
from dat.attacks.bound import BoundAttack, on
from dat.attacks.fab import FAB
from dat.attacks.fgsm import FGSM
from dat.attacks.free import Free
from dat.attacks.mode import attack_mode
from dat.attacks.nfgsm import NFGSM
from dat.attacks.none import NoAttack
from dat.attacks.pgd import PGD
from dat.attacks.square import Square
from dat.attacks.target import AttackTarget, Loss
from dat.attacks.yopo import YOPO
from dat.core.deprecation import renamed_names

if not TYPE_CHECKING:
    __getattr__ = renamed_names(__name__, Victim="AttackTarget")

ATTACKS: dict[str, type[Attack]] = {
    "none": NoAttack,
    "fgsm": FGSM,
    "n-fgsm": NFGSM,
    "pgd": PGD,
    "free": Free,
    "yopo": YOPO,
    "apgd": APGD,
    "apgd-t": TargetedAPGD,
    "fab": FAB,
    "square": Square,
}

__all__ = [
    "APGD",
    "ATTACKS",
    "FAB",
    "FGSM",
    "NFGSM",
    "PGD",
    "YOPO",
    "Attack",
    "AttackTarget",
    "BoundAttack",
    "Free",
    "Loss",
    "NoAttack",
    "Square",
    "Targeted",
    "TargetedAPGD",
    "attack_mode",
    "on",
]
