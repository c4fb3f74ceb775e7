"""The way in and out: a command is run, and its errors become one line and an exit code."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from dat.commands import parse
from dat.launch import PREEMPTED, is_worker, settle_in

FAILED = 1

BAD_INPUT = 2

DIVERGED = 3

INTERRUPTED = 130

TRACEBACK = bool(os.environ.get("DAT_TRACEBACK"))

"""Set to see where an error came from."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command; bad input ends with one line on standard error and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    settle_in()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # sockets warn, with pages of addresses
    arguments = parse(words)
    try:
        code = arguments.run(arguments, words)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        code = _fail(error)
    except KeyboardInterrupt:
        print("error: interrupted by SIGINT", file=sys.stderr)
        code = INTERRUPTED
    _leave(code)


def _leave(code: int) -> NoReturn:
    """End the process. A worker skips the interpreter's own ending: a thread of the process group
    that asks for the interpreter at that moment aborts it, and a finished run would look failed."""
    if is_worker():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _fail(error: Exception) -> int:
    """One line for what a user can mend; anything else is ours and keeps its traceback.

    What all workers know alike is said by the first one, and the others leave it the time to.
    """
    rank = int(os.environ.get("RANK", 0))
    if hasattr(error, "resumable"):
        if rank == 0:
            print(error, file=sys.stderr)
        return PREEMPTED
    told = is_lost(error) or isinstance(error, ValueError | OSError | ArithmeticError)
    if TRACEBACK or not told:
        traceback.print_exc()
        return FAILED
    if rank == getattr(error, "speaker", 0):
        print(f"error: {_told(error)}", file=sys.stderr)
    elif is_lost(error) or getattr(error, "everywhere", False):
        time.sleep(1)
    else:
        print(f"error: worker {rank}: {_told(error)}", file=sys.stderr)
    if is_lost(error):
        return FAILED
    return DIVERGED if isinstance(error, ArithmeticError) else BAD_INPUT


def _told(error: Exception) -> str:
    """An error of the system as its file and what is wrong with it, without a number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def is_lost(error: Exception) -> bool:
    """Another worker is gone. Its class is not imported here, as torch would come with it."""
    return hasattr(error, "speaker")
