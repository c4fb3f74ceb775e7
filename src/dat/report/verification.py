"""The result of checking an evidence bundle."""

from __future__ import annotations

from typing import Any

from dat.report.tables import print_json, print_table


def show_verification(report: dict[str, Any], *, as_json: bool) -> None:
    """One line per check, the verdict, and what it does not prove."""
    if as_json:
        print_json(report)
        return
    rows = [
        [check["name"], "passed" if check["passed"] else "FAILED", check["detail"]]
        for check in report["checks"]
    ]
    print_table(["Check", "Result", "Detail"], rows, note=_verdict(report))
    if "robustbench" in report:
        print(f"\n{_submission(report['robustbench'])}")


def _verdict(report: dict[str, Any]) -> str:
    failed = [check["name"] for check in report["checks"] if not check["passed"]]
    if failed:
        return f"NOT VERIFIED: {', '.join(failed)}."
    claim = report["claim"]
    figures = [f"TA {claim['ta']:.2f} %"]
    figures += [f"RA at most {suite['ra']:.2f} % ({suite['name']})" for suite in claim["suites"]]
    return (
        f"Verified on {claim['images']} images: {', '.join(figures)}. "
        "Not proven: that the images which withstood these attacks withstand others. No attack was "
        "run, and an evaluation whose attacks were too weak passes as well."
    )


def _submission(submission: dict[str, Any]) -> str:
    folder, (images, claim) = submission["folder"], submission["files"]
    text = f"For RobustBench: {folder}/{images}, and {folder}/{claim} with entries to fill in."
    if submission["images"] < submission["of"]:
        text += (
            f" RobustBench asks for all {submission['of']} test images; this bundle has "
            f"{submission['images']}."
        )
    return text
