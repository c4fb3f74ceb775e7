"""The paper's tables and figures: each is a study of several runs, at two scales."""

from typing import TYPE_CHECKING

from dat.core.lazy import lazy_names
from dat.tools.reproduce.plan import StudyPlan
from dat.tools.reproduce.study import (
    SCALES,
    THEOREM,
    Study,
    StudyRow,
    names,
    parse_study,
    read_study,
)

if TYPE_CHECKING:
    from dat.tools.reproduce.figures import cells, headers
    from dat.tools.reproduce.job import reproduce
    from dat.tools.reproduce.theorem import check_theorem
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        renamed={"Plan": "StudyPlan", "Row": "StudyRow", "prove": "check_theorem"},
        figures="cells headers",
        job="reproduce",
        theorem="check_theorem",
    )

__all__ = [
    "SCALES",
    "THEOREM",
    "Study",
    "StudyPlan",
    "StudyRow",
    "cells",
    "check_theorem",
    "headers",
    "names",
    "parse_study",
    "read_study",
    "reproduce",
]
