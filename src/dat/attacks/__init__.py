"""Inner maximisation oracles: step 5 of Algorithm A1.

An attack gets a closure `x -> per-example loss`, a batch, a threat model and the batch's random
streams. One that must know whether it has won (FAB, targeted APGD) gets a `Victim`, a loss that
also knows the right answers. To add an attack: a file here, a line below.
"""

from dat.attacks.apgd import APGD, TargetedAPGD
from dat.attacks.base import Attack, Targeted
from dat.attacks.fab import FAB
from dat.attacks.fgsm import FGSM
from dat.attacks.free import Free
from dat.attacks.mode import attack_mode
from dat.attacks.nfgsm import NFGSM
from dat.attacks.none import NoAttack
from dat.attacks.pgd import PGD
from dat.attacks.square import Square
from dat.attacks.victim import Loss, Victim
from dat.attacks.yopo import YOPO

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
    "Free",
    "Loss",
    "NoAttack",
    "Square",
    "Targeted",
    "TargetedAPGD",
    "Victim",
    "attack_mode",
]
