"""Inner maximisation oracles: step 5 of Algorithm A1.

An attack gets a closure `x -> per-example loss`, a batch, a threat model and the batch's random
streams; it never sees labels, the model or the network. To add one: a file here, a line below.
"""

from dat.attacks.base import Attack, Loss
from dat.attacks.fgsm import FGSM
from dat.attacks.mode import attack_mode
from dat.attacks.none import NoAttack
from dat.attacks.pgd import PGD

ATTACKS: dict[str, type[Attack]] = {
    "none": NoAttack,
    "fgsm": FGSM,
    "pgd": PGD,
}

__all__ = ["ATTACKS", "FGSM", "PGD", "Attack", "Loss", "NoAttack", "attack_mode"]
