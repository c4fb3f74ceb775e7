"""The self-test finds faults: each one that is planted makes its check fail, on every worker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dat.tools.selftest.registry import CHECKS
from tests.tools import selftest_in_workers
from tests.tools.selftest_in_workers import FAULTS
from tests.workers.forked import run_workers

WORKERS = 2


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Each worker's outcomes, by fault."""
    folder = tmp_path_factory.mktemp("faults")
    run_workers(WORKERS, selftest_in_workers.plant_all, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORKERS)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_its_check(fault: str, found: list[dict[str, Any]]) -> None:
    for outcomes in found:
        outcome = outcomes[fault]
        assert outcome["verdict"] == "FAIL", outcome
        assert outcome["advice"]
        assert outcome["name"] == FAULTS[fault][0]
        assert "Error: " not in outcome["detail"], "the fault itself raised"


def test_every_check_has_a_fault_that_it_finds() -> None:
    assert {check for check, _ in FAULTS.values()} == {check.name for check in CHECKS}


def test_details_name_what_is_wrong(found: list[dict[str, Any]]) -> None:
    details = {fault: outcome["detail"] for fault, outcome in found[0].items()}
    assert "bucket, 5 bits: encode: 1 of" in details["one_wrong_bit"]
    assert "decode, subtract" in details["wrong_decoder"]
    assert "chunked" in details["dropped_last"] and "last 5863" in details["dropped_last"]
    assert "gather" in details["kept_own_first"]
    assert "biased" in details["biased"]
    assert "workers 1 differ" in details["different_replicas"]
    assert "resumed" in details["forgotten_on_resume"]
    assert "second time" in details["not_repeatable"]
    assert "in float16" in details["unscaled_float16"]
