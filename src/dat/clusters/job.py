"""A run on p nodes of q workers, as every launcher must know it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dat.fields import Settings, setting

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,48}[a-z0-9])?")
"""What Kubernetes takes for a name, short enough for what is added to it."""
INTERFACE = re.compile(r"[A-Za-z0-9][\w.@:=^,-]{0,63}|[\^=][\w.,-]{1,63}")
REJOIN = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Else the agents that are left tell the workers' meeting place once and for all, before a node
that comes back can hear it, and all of them wait for each other until they give up."""
HOST = re.compile(r"[A-Za-z0-9]([\w.:-]{0,252}[A-Za-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class Job(Settings):
    """What to start, and where."""

    recipe: str = setting("digits", "a built-in name or a .yaml file")
    settings: tuple[str, ...] = setting((), "key=value")
    nodes: int = setting(2, "nodes", ge=1, le=10_000)
    devices: int = setting(1, "workers a node, one a GPU", ge=1, le=1024)
    name: str = setting("dat", "of the job: small letters, digits and dashes")
    out: str = setting("runs/dat", "the run's folder, which all nodes see")
    interface: str | None = setting(None, "network interface between the nodes, e.g. eth0")
    port: int = setting(29500, "where the nodes meet", ge=1024, le=65535)
    restarts: int = setting(3, "how often workers that die are replaced", ge=0)
    gpus: bool = setting(True, "workers have a GPU each")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"--name {self.name!r}: must be small letters, digits and dashes inside, at most 50"
            )
        if self.interface is not None and not INTERFACE.fullmatch(self.interface):
            raise ValueError(f"--interface {self.interface!r}: is no name of an interface")
        for what, text in (("recipe", self.recipe), ("--out", self.out)):
            if not text or text.startswith("-") or not text.isprintable():
                raise ValueError(f"{what} {text!r}: must be a name or a path, in printable letters")
        for word in self.settings:
            if not word.isprintable() or word.startswith("-"):
                raise ValueError(f"{word!r}: settings are key=value, in printable letters")

    @property
    def train(self) -> list[str]:
        """The words of `dat`, the same on every node."""
        return ["train", self.recipe, *self.settings, "--out", self.out]

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of torchrun and of its workers says of the network."""
        found = {REJOIN: "1"}
        if self.interface is not None:
            found["GLOO_SOCKET_IFNAME"] = self.interface
            if self.gpus:
                found["NCCL_SOCKET_IFNAME"] = self.interface
        return found


def name_of(path: str) -> str:
    """A name for a job that leaves its run there: what is not allowed becomes a dash."""
    last = path.rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9]+", "-", last).strip("-")[:50].strip("-") or "dat"
