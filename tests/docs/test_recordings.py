"""The recorded terminal sessions: what is on the screen is what a terminal would show."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import ROOT


@pytest.fixture(scope="module", autouse=True)
def _benchmarks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield


@pytest.fixture(scope="module")
def terminal() -> ModuleType:
    return importlib.import_module("terminal")


@pytest.fixture(scope="module")
def recordings() -> ModuleType:
    return importlib.import_module("recordings")


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("one\r\ntwo\r\n", "one\ntwo"),
        ("10 %\r20", "20 %"),
        ("10 %\r\x1b[2K7 %", "7 %"),
        ("10 %\b\b\x1b[K", "10"),
        ("\x1b[1;31mred\x1b[0m and \x1b[?25lplain", "red and plain"),
        ("\x1b]0;a title\x07text", "text"),
        ("epoch 1\r\nbar\r\nbar\x1b[1A\r\x1b[2Kepoch 2\r\nbar", "epoch 1\nepoch 2\nbar"),
        ("a\r\nb\r\nc\x1b[2A\x1b[J", "a"),
        ("a\tb", "a       b"),
        ("\x1b[3Cx\x1b[2Dy", "  yx"),
        ("━━ 5/5 ± 0.1", "━━ 5/5 ± 0.1"),
    ],
)
def test_the_screen(terminal: ModuleType, output: str, shown: str) -> None:
    whole, split = terminal.Screen(20), terminal.Screen(20)
    whole.feed(output)
    for character in output:
        split.feed(character)
    assert whole.text() == split.text() == shown
    assert not whole.overlong()


def test_a_finished_epoch_stays_above_the_bar(terminal: ModuleType) -> None:
    """What rich writes for a line that is printed while a bar is shown."""
    screen = terminal.Screen(20)
    for epoch in (1, 2, 3):
        screen.feed(f"\r\x1b[2Kepoch {epoch}\r\n[{epoch * '='}]")
    assert screen.text() == "epoch 1\nepoch 2\nepoch 3\n[===]"


def test_lines_longer_than_the_screen_are_reported_in_full(terminal: ModuleType) -> None:
    screen = terminal.Screen(5)
    screen.feed("12345\r\nabcdefghijklm\r\nshort\r\n")
    assert screen.text() == "12345\nabcde\nfghij\nklm\nshort"
    assert screen.overlong() == ["abcdefghijklm"]


def test_a_long_line_that_is_erased_is_not_reported(terminal: ModuleType) -> None:
    screen = terminal.Screen(5)
    screen.feed("abcdefg\x1b[1A\r\x1b[Jok")
    assert (screen.text(), screen.overlong()) == ("ok", [])


@pytest.mark.parametrize("output", ["\x1b[1J", "\x1b[3S", "\x00"])
def test_unknown_output_is_an_error(terminal: ModuleType, output: str) -> None:
    with pytest.raises(ValueError, match="unknown"):
        terminal.Screen(20).feed(output)


ENVIRONMENT = {"PATH": "/usr/bin:/bin"}


def test_a_command_sees_a_terminal_of_that_width(terminal: ModuleType, tmp_path: Path) -> None:
    screen = terminal.Screen(30)
    (tmp_path / "file").touch()
    words = ["sh", "-c", "stty size; ls; echo error >&2; exit 3"]
    assert terminal.run(terminal.Command("", words), screen, tmp_path, ENVIRONMENT) == 3
    assert screen.text() == f"{terminal.ROWS} 30\nfile\nerror"


def test_ctrl_c_is_pressed_when_a_text_appears(terminal: ModuleType, tmp_path: Path) -> None:
    screen = terminal.Screen(30)
    script = "trap 'echo stopped; exit 75' INT; echo first; echo second; sleep 60"
    command = terminal.Command("", ["sh", "-c", script], interrupt_at="second")
    assert terminal.run(command, screen, tmp_path, ENVIRONMENT) == 75
    assert screen.text() == "first\nsecond\n^Cstopped"


def test_a_long_command_is_continued(recordings: ModuleType, terminal: ModuleType) -> None:
    screen = terminal.Screen(30)
    recordings.type_in(screen, "dat train digits train.epochs=3 model.width=8")
    assert screen.lines()[:-1] == [
        "$ dat train digits \\",
        "      train.epochs=3 \\",
        "      model.width=8",
    ]
    assert not screen.overlong()


def test_paths_of_this_machine_are_reported(recordings: ModuleType, terminal: ModuleType) -> None:
    screen = terminal.Screen(20)
    screen.feed(f"written to {ROOT}/x\r\n")
    (long, private) = recordings.complaints(recordings.SESSIONS[0], screen)
    assert "too long: written to" in long
    assert private.endswith(f"shows {ROOT}")


def test_the_page_has_the_sections_of_the_script(recordings: ModuleType) -> None:
    page = (ROOT / "docs" / "recordings.md").read_text()
    assert page.startswith(recordings.page([]).rstrip())
    titles = {session.title for session in recordings.SESSIONS}
    for title in (line[3:] for line in page.splitlines() if line.startswith("## ")):
        assert title in titles
