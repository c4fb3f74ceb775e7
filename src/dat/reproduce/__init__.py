"""The paper's tables and figures: each a study of several runs, at two scales."""

from dat.reproduce.figures import cells, headers
from dat.reproduce.job import reproduce
from dat.reproduce.runs import Plan
from dat.reproduce.study import SCALES, Row, Study, names, parse_study, read_study
from dat.reproduce.theorem import NAME as THEOREM
from dat.reproduce.theorem import prove

__all__ = [
    "SCALES",
    "THEOREM",
    "Plan",
    "Row",
    "Study",
    "cells",
    "headers",
    "names",
    "parse_study",
    "prove",
    "read_study",
    "reproduce",
]
