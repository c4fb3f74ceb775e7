import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dat.distributed.probe import lower_quartile

seconds = st.lists(st.floats(1e-9, 10), min_size=2, max_size=20)


@given(times=seconds)
def test_the_lower_quartile_lies_within_the_samples(times: list[float]) -> None:
    quartile = lower_quartile(times)
    assert min(times) * (1 - 1e-9) <= quartile <= max(times) * (1 + 1e-9)
    assert np.isclose(quartile, np.quantile(times, 0.25), atol=0)
