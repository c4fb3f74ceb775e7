import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dat.comm.probe import lower_quartile

seconds = st.lists(st.floats(1e-9, 10), min_size=2, max_size=20)


@given(taken=seconds)
def test_a_reading_lies_among_what_was_measured(taken: list[float]) -> None:
    found = lower_quartile(taken)
    assert min(taken) * (1 - 1e-9) <= found <= max(taken) * (1 + 1e-9)
    assert np.isclose(found, np.quantile(taken, 0.25), atol=0)
