"""Values of settings, kept apart from the modules that use them, because those import torch."""

BATCH_NORM_SCOPES = ("local", "sync", "ghost")
"""Which images batch normalization takes its statistics from (`batch_norm.py`)."""
GATHER_CHOICES = ("attack", "block")
"""How long the gathered weights of a sharded model are kept (`sharded.py`)."""
