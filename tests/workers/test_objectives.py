"""An objective with all its options on several workers, with batch normalization."""

from __future__ import annotations

from pathlib import Path

from tests.workers.conftest import DAT, run, train, weights

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
"""Two steps, so that rounding errors do not grow."""
MIXED = ("data.labels=700", "data.unlabelled=rest", "data.epoch_by=both", "train.batch=480")


def test_batch_normalisation_works_with_ddp_and_a_concatenated_forward(tmp_path: Path) -> None:
    """TRADES, unlabelled images, AWP and batch norm on three workers: trains, and all replicas stay
    identical (otherwise the run would stop with an error)."""
    words = ("objective.name=trades", *MIXED, "train.awp=0.01", "model.name=preact-resnet18")
    out = train(DAT, tmp_path, *TINY, *words, "train.epochs=2", "--workers", "3")
    state = weights(out)
    assert all(value.isfinite().all() for value in state.values())
    result = run([*DAT, "evaluate", str(out), "--attacks", "clean", "--quiet"], tmp_path)
    assert result.returncode == 0, result.stderr
