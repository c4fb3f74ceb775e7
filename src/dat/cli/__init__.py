"""The command line: `main` runs a command and turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from dat.cli.parser import parse
from dat.core.imports import name_clash
from dat.jobs.launch import PREEMPTED, bind_to_launcher, is_worker

FAILED = 1
BAD_INPUT = 2
DIVERGED = 3
INTERRUPTED = 130
TRACEBACK = bool(os.environ.get("DAT_TRACEBACK"))
"""Whether errors keep their traceback."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit; bad input is one line on standard error and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    bind_to_launcher()
    if "OMP_WAIT_POLICY" not in os.environ:  # spinning for milliseconds stalls shared cores
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # sockets warn, with pages of addresses
    arguments = parse(argv)
    try:
        code = arguments.run(arguments, argv)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        code = _fail(error)
    except KeyboardInterrupt as interrupt:
        lines = ["error: interrupted by SIGINT", *getattr(interrupt, "__notes__", ())]
        if sys.stderr.isatty():
            lines.insert(0, "")  # end the line with ^C, or with a progress bar
        print("\n".join(lines), file=sys.stderr)
        code = INTERRUPTED
    _exit(code)


def _exit(code: int) -> NoReturn:
    """End the process. A worker skips the interpreter's shutdown: a thread of the process group
    that asks for the interpreter during it aborts the process, and a finished run looks failed."""
    if is_worker():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _fail(error: Exception) -> int:
    """Print one line for what the user can fix, a traceback for anything else.

    An error that all workers share is printed by one of them; the others give it the time to.
    """
    rank = int(os.environ.get("RANK", 0))
    if hasattr(error, "resumable"):
        if rank == 0:
            print(error, file=sys.stderr)
        return PREEMPTED
    expected = is_lost(error) or isinstance(error, ValueError | OSError | ArithmeticError)
    if TRACEBACK or not expected:
        traceback.print_exc()
        if isinstance(error, ImportError | AttributeError) and (clash := name_clash()):
            print(f"error: {clash}", file=sys.stderr)
        return FAILED
    if rank == getattr(error, "reporting_rank", 0):
        print(f"error: {_message(error)}", file=sys.stderr)
    elif is_lost(error) or getattr(error, "everywhere", False):
        time.sleep(1)
    else:
        print(f"error: worker {rank}: {_message(error)}", file=sys.stderr)
    if is_lost(error):
        return FAILED
    return DIVERGED if isinstance(error, ArithmeticError) else BAD_INPUT


def _message(error: Exception) -> str:
    """The text of an error; of an operating system's without its number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def is_lost(error: Exception) -> bool:
    """Whether another worker is gone. Importing the error's class would import torch."""
    return hasattr(error, "reporting_rank")
