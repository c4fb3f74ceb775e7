"""A run on p nodes of q workers, independent of the launcher."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from dat.core.settings import Settings, setting

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?")
"""A valid Kubernetes name, short enough for the suffixes that are added to it."""
INTERFACE = re.compile(r"[A-Za-z0-9][\w.@:=^,-]{0,63}|[\^=][\w.,-]{1,63}")
REJOIN = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Without it, the remaining agents publish the address of the rendezvous before a restarted node
can receive it, and all of them wait for each other until they time out."""
HOST = re.compile(r"[A-Za-z0-9]([\w.:-]{0,252}[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class ClusterJob(Settings):
    """What to run, and on which nodes."""

    recipe: str = setting("digits", "a built-in name or a .yaml file")
    settings: tuple[str, ...] = setting((), "key=value")
    code: tuple[str, ...] = setting((), "key=value that names code, repeated to resume the run")
    nodes: int = setting(2, "number of nodes", ge=1, le=10_000)
    devices: int = setting(1, "workers per node, one per GPU", ge=1, le=1024)
    name: str = setting("dat", "name of the job: lowercase letters, digits and dashes")
    out: str = setting("runs/dat", "the run's folder, on storage that all nodes share")
    interface: str | None = setting(None, "network interface between the nodes, e.g. eth0")
    port: int = setting(29500, "port of the rendezvous", ge=1024, le=65535)
    restarts: int = setting(3, "maximum number of restarts after a worker dies", ge=0)
    gpus: bool = setting(True, "one GPU per worker")
    setup: str = setting("", "shell commands that run before the training command")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"--name {self.name!r}: must be at most 50 lowercase letters, digits and inner "
                "dashes"
            )
        if self.interface is not None and not INTERFACE.fullmatch(self.interface):
            raise ValueError(f"--interface {self.interface!r}: not a valid interface name")
        for what, text in (("recipe", self.recipe), ("--out", self.out)):
            if not text or text.startswith("-") or not text.isprintable():
                raise ValueError(
                    f"{what} {text!r}: must be a name or a path of printable characters"
                )
        check_shell(self.setup)
        for word in (*self.settings, *self.code):
            if not word.isprintable() or word.startswith("-"):
                raise ValueError(f"{word!r}: settings are key=value, in printable characters")

    @property
    def train(self) -> list[str]:
        """The arguments of `dat`, the same on every node."""
        return ["train", self.recipe, *self.settings, "--out", self.out]

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of torchrun and its workers that configure the network."""
        variables = {REJOIN: "1"}
        if self.interface is not None:
            variables["GLOO_SOCKET_IFNAME"] = self.interface
            if self.gpus:
                variables["NCCL_SOCKET_IFNAME"] = self.interface
        return variables


def check_shell(text: str) -> None:
    """Refuse shell commands that would change the meaning of the lines after them."""
    lines = text.replace("\t", " ").split("\n")
    if not all(line.isprintable() for line in lines):
        raise ValueError("--setup: must be lines of printable characters")
    bash = shutil.which("bash")
    if not text or bash is None:
        return
    checked = subprocess.run(
        [bash, "-n"], input=text, capture_output=True, text=True, env={"LC_ALL": "C"}
    )
    problems = checked.stderr.strip().splitlines()  # an unfinished here-document is a mere warning
    if checked.returncode or problems or text.endswith("\\"):
        reason = problems[0].removeprefix(f"{bash}: ") if problems else "it ends in a backslash"
        raise ValueError(f"--setup: not complete commands of bash ({reason})")


def name_of(path: str) -> str:
    """A job name for a run's folder: invalid characters become dashes."""
    last = path.rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:50].strip("-") or "dat"
