"""Record terminal sessions as text, at 80 and 100 columns: docs/recordings.md.

    python benchmarks/recordings.py                     # all sessions; a few minutes
    python benchmarks/recordings.py --sessions planning

Each command runs in a pseudo-terminal, in a temporary folder; the page shows the screen after it
has ended. Exits with 1 if a line is longer than the terminal is wide or shows a path of this
machine.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from terminal import Command, Screen, run

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "recordings.md"
COLUMNS = (80, 100)
SETTINGS = "model.width=8 attack.steps=3 evaluate.report=0"

WRONG = """\
base: digits
threat: {eps: 8}
attack: {name: pgd, stepz: 5}
optimizer: {name: lamp, lr: fast}
train: {epochs: 0}
"""


class File(NamedTuple):
    """A file that the reader writes."""

    name: str
    content: str


class Session(NamedTuple):
    name: str
    title: str
    about: str
    steps: Sequence[str | File | Command]


def interrupted(shown: str, at: str) -> Command:
    return Command(shown, dat(shown), interrupt_at=at)


def dat(shown: str) -> list[str]:
    _, *words = shlex.split(shown)
    return [sys.executable, "-m", "dat", *words]


SESSIONS = (
    Session(
        "first-steps",
        "First steps",
        "List the recipes, look up a setting, train, evaluate under a stronger attack, compare.",
        (
            "dat recipes",
            "dat config digits attack",
            "dat train digits --workers 2 train.epochs=5",
            "dat train digits-standard --workers 2 train.epochs=5",
            "dat evaluate runs/digits --attacks pgd-20,pgd-100x5 --images 100",
            "dat compare runs/digits-standard runs/digits",
        ),
    ),
    Session(
        "mistakes",
        "Mistakes and interruptions",
        "A recipe with several errors, eps on the wrong scale, and a run that is interrupted by "
        "Ctrl-C and resumed.",
        (
            File("wrong.yaml", WRONG),
            "dat train wrong.yaml",
            "dat train digits threat.eps=8",
            interrupted(f"dat train digits train.epochs=6 {SETTINGS}", "epoch 3/6"),
            "dat train --resume runs/digits",
        ),
    ),
    Session(
        "planning",
        "Planning and reproducing",
        "Predict the step time of a cluster, list the runs of a study, write a job script.",
        (
            "dat plan imagenet --nodes 6 --devices 6 --link 1gbit --compute 2.4 --cores 40",
            "dat reproduce table1 --dry-run",
            "dat launch slurm imagenet data.name=/data/imagenet --nodes 6 --devices 6 "
            "--time 12:00:00 --out runs/imagenet --file job.sh",
        ),
    ),
)


def environment(home: Path) -> dict[str, str]:
    """Nothing of this machine but what starts Python."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    source = {"PYTHONPATH": str(ROOT / "src"), "HOME": str(home)}
    return kept | source | {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}


def recorded(session: Session, columns: int) -> Screen:
    """The screen after all commands of a session."""
    screen = Screen(columns)
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home, "work")
        folder.mkdir()
        for step in session.steps:
            take(step, screen, folder)
    return screen


def take(step: str | File | Command, screen: Screen, folder: Path) -> None:
    if isinstance(step, File):
        (folder / step.name).write_text(step.content)
        type_in(screen, f"cat {step.name}")
        screen.feed(step.content.replace("\n", "\r\n"))
    else:
        command = Command(step, dat(step)) if isinstance(step, str) else step
        type_in(screen, command.shown)
        run(command, screen, folder, environment(folder.parent))
    if screen.column:
        screen.feed("\r\n")
    screen.feed("\r\n")


def type_in(screen: Screen, command: str) -> None:
    """A command behind a prompt, in as many lines as it needs."""
    line, *others = continued(command, screen.columns)
    screen.feed("\r\n".join([f"$ {line}", *(f"      {other}" for other in others)]) + "\r\n")


def continued(command: str, columns: int) -> list[str]:
    """A command, broken with backslashes where it is longer than the terminal is wide."""
    lines, line = [], ""
    for word in command.split():
        longer = f"{line} {word}".strip()
        if line and len(longer) > columns - len("       \\"):
            lines.append(f"{line} \\")
            longer = word
        line = longer
    return [*lines, line]


def complaints(session: Session, screen: Screen) -> Iterator[str]:
    """What a reader should not see."""
    place = f"{session.name}, {screen.columns} columns"
    yield from (f"{place}: too long: {line}" for line in screen.overlong())
    joined = screen.text().replace("\n", "")
    private = {str(ROOT), sys.prefix, tempfile.gettempdir() + os.sep, str(Path.home()) + os.sep}
    yield from (f"{place}: shows {path}" for path in sorted(private) if path in joined)


def section(session: Session, screens: Sequence[Screen]) -> str:
    blocks = [f"{it.columns} columns:\n\n```text\n{it.text()}\n```\n" for it in screens]
    return "\n".join([f"## {session.title}\n\n{session.about}\n", *blocks])


def page(sections: Sequence[str]) -> str:
    introduction = (
        "# Recordings\n\n"
        "Whole sessions, as they look in a terminal of 80 and of 100 columns. Progress bars show "
        "their last state; a\ncommand that does not fit into a line is continued after a "
        "backslash. `python benchmarks/recordings.py` runs the\ncommands and writes this page.\n"
    )
    return "\n".join([introduction, *sections])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [session.name for session in SESSIONS]
    parser.add_argument("--sessions", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE")
    arguments = parser.parse_args()
    sections, problems = [], []
    for session in (it for it in SESSIONS if it.name in arguments.sessions):
        screens = [recorded(session, columns) for columns in COLUMNS]
        sections.append(section(session, screens))
        problems += [problem for screen in screens for problem in complaints(session, screen)]
    arguments.out.write_text(page(sections))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
