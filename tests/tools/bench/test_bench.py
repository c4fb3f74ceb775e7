"""`dat bench comm` and `quantizer`: results are right, and nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from dat.tools.bench import link
from tests.workers.conftest import DAT, run, torchrun


def bench(*words: str, cwd: Path) -> list[dict[str, Any]]:
    done = run([*DAT, "bench", *words, "--json"], cwd)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def test_quantizers_are_measured(tmp_path: Path) -> None:
    words = ("--values", "3e4", "--bits", "8,3", "--repeats", "2", "--plot", "speed.png")
    rows = bench("quantizer", *words, cwd=tmp_path)
    assert [(row["quantizer"], row["bits"]) for row in rows] == [
        (name, bits) for name in ("bucket", "tensor", "vector") for bits in (8, 3)
    ]
    noise = {(row["quantizer"], row["bits"]): row["noise"] for row in rows}
    assert noise["bucket", 8] < 0.001 < noise["bucket", 3] < noise["vector", 3]
    assert all(row["encode_ms"] > 0 and row["decode_ms"] > 0 for row in rows)
    assert rows[0]["bits_a_value"] == pytest.approx(8 + 32 / 512, rel=0.01)
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_protocols_are_measured_and_counted(tmp_path: Path) -> None:
    words = ("--workers", "2", "--values", "51200", "--repeats", "1", "--plot", "sum.svg")
    rows = {(row["protocol"], row["bits"]): row for row in bench("comm", *words, cwd=tmp_path)}
    assert set(rows) == {
        *((name, 32) for name in ("dense", "gather", "server", "chunked")),
        *((name, 8) for name in ("gather", "server", "chunked", "ring")),
        *((name, 4) for name in ("gather", "server", "chunked")),
    }
    whole = 51200 + 4 * 100
    assert rows["gather", 8]["bytes"] == rows["server", 8]["bytes"] == 2 * whole
    assert rows["chunked", 8]["bytes"] == rows["ring", 8]["bytes"] == 2 * whole
    assert rows["dense", 32]["bytes"] == 2 * 4 * 51200
    assert all(row["seconds"] > 0 and "bytes_interface" not in row for row in rows.values())
    assert "<svg" in (tmp_path / "sum.svg").read_text()


def test_nodes_of_several_workers_are_measured(tmp_path: Path) -> None:
    words = ("--workers", "4", "--inside", "2", "--protocols", "hybrid", "--values", "51200")
    (row,) = bench("comm", *words, "--bits", "8", "--repeats", "1", cwd=tmp_path)
    between, inside = 2 * (51200 + 4 * 100), 2 * 2 * 1 * 4 * 51200
    assert row["bytes_between"] == between and row["bytes"] == between + inside


@pytest.mark.slow
def test_it_runs_under_a_launcher(tmp_path: Path) -> None:
    words = ("--values", "1e4", "--repeats", "1", "--bits", "4", "--protocols", "chunked")
    done = run([*torchrun(2), "bench", "comm", *words], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "chunked" in done.stdout and "as launched" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("comm", "--link", "fast"), "link 'fast': must be one of 100mbit, 1gbit"),
        (("comm", "--protocols", "dense,ping"), "protocol 'ping': must be one of dense, gather"),
        (("comm", "--bits", "9"), "quantizer.bits = 9: must be one of"),
        (("comm", "--workers", "4", "--inside", "3"), "--inside 3: must divide --workers 4"),
        (("comm", "--quantizer", "big"), "quantizer 'big': must be one of bucket, tensor, vector"),
        (("comm", "--bits", "4", "--protocols", "ring"), "none of these protocols"),
        (("quantizer", "--plot", "speed.doc"), "speed.doc: a plot is written to a file that ends"),
        (("quantizer", "--plot", "no/speed.png"), "folder no does not exist"),
    ],
)
def test_bad_input_gets_one_clear_line(
    tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    done = run([*DAT, "bench", *words], tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and message in line


def test_a_link_needs_root_and_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    with pytest.raises(ValueError, match="needs root: use sudo"), link.testbed(2, "1gbit"):
        pass
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    with pytest.raises(ValueError, match="install iproute2"), link.testbed(2, "1gbit"):
        pass


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(link.PREFIX)]


def left_behind() -> list[str]:
    """Namespaces whose process no longer exists; other processes may be using theirs."""
    owners = {name: re.sub(r"\D", " ", name).split()[0] for name in namespaces()}
    return [name for name, owner in owners.items() if not Path(f"/proc/{owner}").exists()]


@pytest.fixture(scope="module")
def _hosts() -> None:
    """Skip the test if namespaces cannot be created."""
    try:
        with link.testbed(2, "1gbit"):
            assert len(namespaces()) >= 3
    except (ValueError, OSError) as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.mark.slow
@pytest.mark.usefixtures("_hosts")
def test_the_wire_carries_what_the_ledger_counted(tmp_path: Path) -> None:
    """The kernel's counter of each host's interface agrees within 2 % and the headers of TCP/IP.
    And the rate of the link is limited."""
    words = ("--workers", "3", "--values", "1e6", "--bits", "32,8", "--repeats", "1")
    rows = bench("comm", *words, "--link", "100mbit", cwd=tmp_path)
    assert {row["link"] for row in rows} == {"100mbit"} and len(rows) == 8
    for row in rows:
        headers = 1 + 66 / 1448  # for Ethernet packets; most are sent in larger ones
        assert row["bytes"] <= row["bytes_interface"] <= 1.02 * headers * row["bytes"], row
        assert row["seconds"] > 0.8 * 8 * row["bytes_busiest"] / link.RATES["100mbit"]
    assert left_behind() == []


@pytest.mark.slow
@pytest.mark.usefixtures("_hosts")
def test_what_leaves_a_host_of_several_workers_is_what_was_counted_between(tmp_path: Path) -> None:
    words = ("--workers", "4", "--inside", "2", "--values", "1e6", "--bits", "8", "--repeats", "1")
    limits = ("--protocols", "hybrid,chunked,gather,server,ring", "--link", "unshaped")
    rows = {row["protocol"]: row for row in bench("comm", *words, *limits, cwd=tmp_path)}
    for row in rows.values():
        headers = 1 + 66 / 1448
        counted = row["bytes_between"]
        assert counted <= row["bytes_interface"] <= 1.02 * headers * counted, row
    assert rows["hybrid"]["bytes_between"] * 2 == rows["chunked"]["bytes_between"]


@pytest.mark.slow
@pytest.mark.usefixtures("_hosts")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_it_is_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    words = ("bench", "comm", "--workers", "2", "--values", "1e6", "--link", "100mbit")
    running = subprocess.Popen(
        [*DAT, *words, "--repeats", "1000"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    mine = f"{link.PREFIX}{running.pid}"
    try:
        patience, hosts = time.monotonic() + 120, (f"{mine}h0", f"{mine}h1")
        while not all(map(workers_in, hosts)) and time.monotonic() < patience:
            time.sleep(0.1)
        workers = [pid for host in hosts for pid in workers_in(host)]
        assert len(workers) == 2
        running.send_signal(number)
        running.communicate(timeout=60)
    finally:
        running.kill()
        running.communicate()
    if number == signal.SIGKILL:  # the next one removes what is left
        assert mine + "switch" in namespaces()
        with link.testbed(1, "1gbit"):
            pass
    assert left_behind() == []
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def workers_in(namespace: str) -> list[int]:
    listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]
