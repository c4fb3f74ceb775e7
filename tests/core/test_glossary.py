"""Abbreviations are spelled out, from one place."""

from __future__ import annotations

from dat.core.glossary import legend


def test_each_abbreviation_is_explained_once() -> None:
    text = legend(["Run", "TA (%)", "RA 0.2", "RA 8/255", "C (s)", "MB/it"], RA="pgd-20")
    assert text == (
        "TA: clean accuracy; RA: robust accuracy (pgd-20); C: seconds of communication per epoch; "
        "MB/it: megabytes sent per iteration by all workers together."
    )


def test_other_words_need_no_legend() -> None:
    assert legend(["Run", "Method", "Batch"]) == ""
