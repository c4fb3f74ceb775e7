"""What a backend may still refer to is kept until it does not."""

from __future__ import annotations

import threading
import time

import torch

from dat.distributed.collectives import InFlight


def test_tensors_are_kept_while_c_plus_plus_refers_to_them() -> None:
    in_flight, tensor, future = InFlight(), torch.ones(2), torch.futures.Future[None]()
    view = tensor[:1]  # refers to its base in C++
    in_flight.hold(tensor, future=future)
    assert len(in_flight) == 1
    del view
    assert len(in_flight) == 0


def test_references_of_python_do_not_count() -> None:
    in_flight, tensor = InFlight(), torch.ones(2)
    others = [tensor, tensor]
    in_flight.hold(*others)
    assert len(in_flight) == 0


def test_the_exit_waits_for_the_backend() -> None:
    in_flight, tensor = InFlight(), torch.ones(2)
    views = [tensor[:1]]
    in_flight.hold(tensor)

    def release() -> None:
        time.sleep(0.05)
        views.clear()

    thread = threading.Thread(target=release)
    thread.start()
    in_flight.drain()
    assert not views
    thread.join()
