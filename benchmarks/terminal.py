"""Commands in a pseudo-terminal, and the text that is on its screen afterwards."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROWS = 50
CONTROLLED = 'exec "$@" <"$0"'
"""A new session that opens a terminal is controlled by it: Ctrl-C becomes SIGINT."""
ESCAPE = re.compile(
    r"\x1b(?:\[(?P<arguments>[\d;?]*)(?P<final>[A-Za-z])|\](?P<title>[^\x07\x1b]*)(?:\x07|\x1b\\))"
)
UNFINISHED = re.compile(r"\x1b(?:\[[\d;?]*|\][^\x07\x1b]*\x1b?)?$")
IGNORED = "mhl"
"""Colors, and modes such as a hidden cursor."""


class Screen:
    """Text with its scrollback, as a terminal of so many columns shows it."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.row = self.column = 0
        self.wrapped = set[int]()
        """Rows that were full before their line ended."""
        self._rows: list[list[str]] = [[]]
        self._pending = ""

    def feed(self, text: str) -> None:
        """An escape sequence may be split between calls."""
        text = self._pending + text
        incomplete = UNFINISHED.search(text)
        end = incomplete.start() if incomplete else len(text)
        self._pending = text[end:]
        place = 0
        while place < end:
            escape = ESCAPE.match(text, place)
            if escape:
                self._control(escape)
            else:
                self._put(text[place])
            place = escape.end() if escape else place + 1

    def lines(self) -> list[str]:
        return ["".join(row).rstrip() for row in self._rows]

    def text(self) -> str:
        return "\n".join(self.lines()).rstrip("\n")

    def overlong(self) -> list[str]:
        """The lines that are longer than the screen is wide, in full."""
        found, continues = list[str](), False
        for number, row in enumerate(self._rows):
            if continues:
                found[-1] += "".join(row)
            elif number in self.wrapped:
                found.append("".join(row))
            continues = number in self.wrapped
        return found

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self._down()
        elif character == "\b":
            self.column = max(0, self.column - 1)
        elif character == "\t":
            self.column = min(self.columns - 1, (self.column // 8 + 1) * 8)
        elif character >= " ":
            self._write(character)
        elif character != "\x07":
            raise ValueError(f"unknown control character {character!r}")

    def _write(self, character: str) -> None:
        if self.column == self.columns:
            self.wrapped.add(self.row)
            self.column = 0
            self._down()
        row = self._rows[self.row]
        row += " " * (self.column + 1 - len(row))
        row[self.column] = character
        self.column += 1

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self._rows):
            self._rows.append([])

    def _control(self, escape: re.Match[str]) -> None:
        final, arguments = escape["final"], escape["arguments"]
        if final is None or final in IGNORED:
            return
        count = int(arguments or 1) if final in "ABCDG" else int(arguments or 0)
        if final == "A":
            self.row = max(0, self.row - count)
        elif final == "B":
            self.row = min(len(self._rows) - 1, self.row + count)
        elif final == "C":
            self.column = min(self.columns - 1, self.column + count)
        elif final == "D":
            self.column = max(0, self.column - count)
        elif final == "G":
            self.column = count - 1
        elif final == "K" and count in (0, 2):
            self._erase(0 if count == 2 else self.column)
        elif final == "J" and count == 0:
            self._erase(self.column)
            del self._rows[self.row + 1 :]
            self.wrapped = {row for row in self.wrapped if row <= self.row}
        else:
            raise ValueError(f"unknown escape sequence {escape[0]!r}")

    def _erase(self, first: int) -> None:
        del self._rows[self.row][first:]
        self.wrapped.discard(self.row)


class Command(NamedTuple):
    """What is typed, what runs, and at which text on the screen Ctrl-C is pressed."""

    shown: str
    words: Sequence[str]
    interrupt_at: str = ""


def run(command: Command, screen: Screen, folder: Path, environment: Mapping[str, str]) -> int:
    """Run a command in a terminal of its own; its exit code."""
    terminal, its_side = pty.openpty()
    size = struct.pack("HHHH", ROWS, screen.columns, 0, 0)
    fcntl.ioctl(its_side, termios.TIOCSWINSZ, size)
    process = subprocess.Popen(
        ["sh", "-c", CONTROLLED, os.ttyname(its_side), *command.words],
        stdin=its_side,
        stdout=its_side,
        stderr=its_side,
        cwd=folder,
        env=dict(environment),
        start_new_session=True,
        preexec_fn=_heed_interrupts,
    )
    os.close(its_side)
    try:
        _show(terminal, screen, command.interrupt_at)
    finally:
        os.close(terminal)
        process.wait()
    return process.returncode


def _heed_interrupts() -> None:
    """As in a terminal, also where this process ignores Ctrl-C because it is in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _show(terminal: int, screen: Screen, interrupt_at: str, timeout: float = 1800) -> None:
    """Copy output to the screen until the terminal is closed."""
    deadline = time.monotonic() + timeout
    waiting, undecoded = interrupt_at, b""
    while select.select([terminal], [], [], deadline - time.monotonic())[0]:
        try:
            output = os.read(terminal, 65536)
        except OSError:  # Linux reports the end of a terminal as an error
            return
        if not output:
            return
        text, undecoded = _decoded(undecoded + output)
        screen.feed(text)
        if waiting and waiting in screen.text():
            os.write(terminal, b"\x03")
            waiting = ""
    raise TimeoutError(f"no output and no end within {timeout:.0f} s")


def _decoded(output: bytes) -> tuple[str, bytes]:
    """The text, and the bytes of a last character that is still incomplete."""
    try:
        return output.decode(), b""
    except UnicodeDecodeError as error:
        if len(output) - error.start > 3:
            raise
        return output[: error.start].decode(), output[error.start :]
