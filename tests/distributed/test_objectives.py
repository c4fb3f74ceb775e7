"""Every objective on several workers: the same result, and no trouble with batch normalisation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.conftest import DAT, distance, run, train, weights

TINY = (
    *(
        "model.width=4",
        "train.batch=480",
        "train.epochs=1",
        "evaluate.report=0",
        "evaluate.attacks=clean",
    ),
    *("train.select_steps=1", "comm.threads=1", "data.holdout=0", "attack.steps=2"),
)
"""Two steps: rounding has no time to grow."""
MIXED = ("data.labels=700", "data.unlabelled=rest", "data.epoch_by=both", "train.batch=480")


@pytest.mark.parametrize(
    "words",
    [
        ("objective.name=trades",),
        ("objective.name=gradalign", "attack.name=fgsm"),
        ("objective.name=trades", *MIXED, "train.awp=0.01"),
        ("attack.name=free", "attack.replays=2"),
    ],
    ids=str,
)
def test_the_result_does_not_depend_on_the_workers(tmp_path: Path, words: tuple[str, ...]) -> None:
    own = [it for it in TINY if not (it.startswith("attack.steps") and "attack" in str(words))]
    alone = train(DAT, tmp_path, *own, *words)
    two = train(DAT, tmp_path, *own, *words, "--workers", "2")
    assert distance(weights(two), weights(alone)) < 1e-4


def test_batch_normalisation_ddp_and_the_concatenated_forward_go_together(tmp_path: Path) -> None:
    """TRADES, unlabelled images, AWP and a BN network on three workers: it trains, and all replicas
    stay the same (else the exchange would refuse the next step's statistics)."""
    words = ("objective.name=trades", *MIXED, "train.awp=0.01", "model.name=preact-resnet18")
    out = train(DAT, tmp_path, *TINY, *words, "train.epochs=2", "--workers", "3")
    state = weights(out)
    assert all(value.isfinite().all() for value in state.values())
    done = run([*DAT, "evaluate", str(out), "--attacks", "clean", "--quiet"], tmp_path)
    assert done.returncode == 0, done.stderr
