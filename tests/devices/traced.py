"""A device of torch whose streams and events are vector clocks: it finds races without a GPU.

`traced_device.cpp` computes on the CPU what is given to the device, and notes for each operation on
which stream it would run, and which memory it would read and write. A device exists once in a
process, so these checks run in processes of their own (`tests.workers.forked`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils.backend_registration import rename_privateuse1_backend

HERE = Path(__file__).parent
SOURCES = [HERE / name for name in ("stream_clock.h", "stream_clock.cpp", "traced_device.cpp")]
COMPILER = "g++"


def missing() -> str:
    """Why the device cannot be built, or an empty string."""
    return "" if shutil.which(COMPILER) else f"no {COMPILER}: the traced device has to be compiled"


def build() -> Path:
    """The compiled device; compiled again if its sources or torch have changed."""
    text = b"".join(path.read_bytes() for path in SOURCES) + torch.__version__.encode()
    folder = Path(tempfile.gettempdir(), f"dat-tests-{os.getuid()}")
    library = folder / f"traced-{hashlib.sha256(text).hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(exist_ok=True)
    place = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=folder) as own:  # another process may compile it as well
        compiled = Path(own, "traced.so")
        flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{place}/include", f"-L{place}/lib"]
        if torch.compiled_with_cxx11_abi():
            flags.append("-D_GLIBCXX_USE_CXX11_ABI=1")
        sources = [str(path) for path in SOURCES if path.suffix == ".cpp"]
        command = [COMPILER, *flags, *sources, "-lc10", "-ltorch_cpu", "-o", str(compiled)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"the traced device does not compile:\n{result.stderr}")
        compiled.rename(library)
    return library


class TracedDevice:
    """The device, after it has been loaded into this process."""

    def __init__(self, library: Path) -> None:
        rename_privateuse1_backend("traced")
        self._library = ctypes.CDLL(str(library))
        self._library.hand_over.restype = ctypes.c_int64
        self.device = device = torch.device("traced", 0)
        module = SimpleNamespace(
            Stream=lambda priority=0: torch.Stream(device),
            Event=lambda: torch.Event(device),
            current_stream=lambda index=None: torch.accelerator.current_stream(device),
            stream=lambda stream: nullcontext() if stream is None else stream,
            is_available=lambda: True,
            is_initialized=lambda: True,
            device_count=lambda: 1,
            current_device=lambda: 0,
            manual_seed=lambda seed: None,  # the CPU's generator draws for this device
            get_rng_state=lambda device=None: torch.empty(0),
            set_rng_state=lambda state, device=None: None,
            _is_in_bad_fork=lambda: False,
            manual_seed_all=lambda seed: None,
        )
        torch._register_device_module("traced", module)
        self._trace_threads()

    def _trace_threads(self) -> None:
        """A thread knows what the one that started it knew, and hands back what it knows when it is
        joined. Other ways to hand over work, queues for example, order nothing."""
        library = self._library
        start, join = threading.Thread.start, threading.Thread.join

        def traced_start(thread: threading.Thread) -> None:
            before, own = library.hand_over(), thread.run

            def traced_run() -> None:
                library.new_thread()
                library.take_over(ctypes.c_int64(before))
                try:
                    own()
                finally:
                    thread.__dict__["after"] = library.hand_over()

            thread.run = traced_run  # type: ignore[method-assign]
            start(thread)

        def traced_join(thread: threading.Thread, timeout: float | None = None) -> None:
            join(thread, timeout)
            if not thread.is_alive() and "after" in thread.__dict__:
                library.take_over(ctypes.c_int64(thread.__dict__["after"]))

        threading.Thread.start = traced_start  # type: ignore[assignment,method-assign]
        threading.Thread.join = traced_join  # type: ignore[assignment,method-assign]

    def races(self) -> list[str]:
        """The races since the last call."""
        text = ctypes.create_string_buffer(1000)
        races: list[str] = []
        while True:
            self._library.next_race(text, ctypes.c_int64(len(text)))
            if not text.value:
                return races
            races.append(text.value.decode())

    def host_reads(self, tensor: Tensor) -> None:
        """The host reads page-locked memory without telling torch, as numpy does."""
        self._host_access(tensor, writes=False)

    def host_writes(self, tensor: Tensor) -> None:
        self._host_access(tensor, writes=True)

    def _host_access(self, tensor: Tensor, *, writes: bool) -> None:
        assert tensor.device.type == "cpu" and tensor.is_contiguous()
        address = ctypes.c_void_p(tensor.data_ptr())
        self._library.host_access(address, ctypes.c_int64(tensor.nbytes), writes)

    @contextmanager
    def no_races(self) -> Iterator[None]:
        """Raise if what happens inside has a race."""
        self.races()
        yield
        if races := self.races():
            raise AssertionError("\n".join(races))
