"""Who may import whom, read from the import statements; and what `import dat` costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import dat

SOURCE = Path(dat.__file__).parent
PYCACHE = "__pycache__"

LAYERS = {
    "foundation": "core kernels",  # knows torch, and nothing of ours
    "components": "attacks objectives optim models data distributed",  # knows the foundation
    "engines": "evaluation train",  # put components to work; know nothing of settings files
    "assembly": "config report export",  # settings become objects, results become documents
    "applications": "jobs tools cli __main__",  # what a person starts; nothing imports them
}
"""The packages, lowest layer first. A module imports from its own package and from layers below."""
BESIDE = {
    *(("core", "kernels"), ("kernels", "core"), ("objectives", "attacks"), ("train", "evaluation")),
    *(("export", "config"), ("tools", "jobs"), ("cli", "jobs"), ("cli", "tools")),
    ("__main__", "cli"),
}
"""What a package knows of another one of its layer."""


def allowed() -> dict[str, frozenset[str]]:
    """For every package, the packages that it may import."""
    below, rules = set[str](), {}
    for names in LAYERS.values():
        for name in names.split():
            beside = {other for one, other in BESIDE if one == name}
            rules[name] = frozenset(below | beside | {name})
        below |= set(names.split())
    return rules


class Import(NamedTuple):
    file: Path
    line: int
    module: str
    name: str
    """What is taken from the module, or nothing."""

    def __str__(self) -> str:
        place = f"{self.file.relative_to(SOURCE.parent)}:{self.line}"
        return f"{place} imports {self.module} {self.name}".strip()

    @property
    def package(self) -> str:
        """Where the import statement stands."""
        return self.file.relative_to(SOURCE).parts[0].removesuffix(".py")

    @property
    def target(self) -> str:
        """The package of ours that is imported, or nothing."""
        words = [*self.module.split("."), self.name]
        return words[1] if words[0] == "dat" else ""

    def below(self, *packages: str) -> bool:
        full = f"{self.module}.{self.name}."
        return any(full.startswith(f"{package}.") for package in packages)


def imports_of(file: Path) -> Iterator[Import]:
    """All of them: those in functions and for the type checker as well."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(file, node.lineno, alias.name, "")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            for alias in node.names:
                yield Import(file, node.lineno, node.module or "", alias.name)


FILES = sorted(SOURCE.rglob("*.py"))
IMPORTS = [found for file in FILES for found in imports_of(file)]
INSIDE = [i for i in IMPORTS if i.target not in ("", "__version__") and i.package != "__init__"]


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 40 and len(INSIDE) > 100


def test_the_top_shows_the_layers() -> None:
    entries = [it for it in SOURCE.iterdir() if it.suffix in ("", ".py") and it.name != PYCACHE]
    packages = {it.name.removesuffix(".py") for it in entries} - {"__init__"}
    assert packages == allowed().keys()
    assert len(entries) <= 20


def test_layers_import_only_what_is_below_them() -> None:
    rules = allowed()
    assert [str(i) for i in INSIDE if i.target not in rules[i.package]] == []


def test_only_distributed_knows_of_collectives() -> None:
    packages = ("torch.distributed", "torch.nn.parallel", "torch._C._distributed_c10d")
    launcher = ("torch.distributed.launcher", "torch.distributed.elastic")
    found = [i for i in IMPORTS if i.below(*packages) and i.package != "distributed"]
    assert [str(i) for i in found if i.file.stem != "launch" or not i.below(*launcher)] == []
    for file in FILES:
        if file.relative_to(SOURCE).parts[0] != "distributed":
            nodes = ast.walk(ast.parse(file.read_text()))
            dotted = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
            assert "torch.distributed" not in dotted, file


def test_nothing_is_imported_by_a_star() -> None:
    assert [str(i) for i in IMPORTS if i.name == "*"] == []


def lists_of_names() -> list[tuple[str, list[str]]]:
    found = []
    for file in FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                found.append((str(file.relative_to(SOURCE)), ast.literal_eval(node.value)))
    return found


@pytest.mark.parametrize(("file", "public"), lists_of_names())
def test_public_names_are_sorted(file: str, public: list[str]) -> None:
    def as_ruff_sorts(name: str) -> tuple[int, str]:  # RUF022: CONSTANTS, Classes, the rest
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    assert public == sorted(set(public), key=as_ruff_sorts)


def test_every_public_name_resolves() -> None:
    assert [name for name in dat.__all__ if getattr(dat, name, None) is None] == []
    assert set(dat.__all__) <= set(dir(dat))


def test_an_unknown_public_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'dat' has no attribute 'PDG'"):
        dat.PDG  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    "code",
    [
        "import dat; dat.__version__",
        "import dat; dir(dat)",
        "import dat; dat.attacks.on; dat.objectives.TRADES",
        "import dat.cli",
        "import dat.cli; dat.cli.main(['--help'])",
        "import dat.cli; dat.cli.main(['train', '--help'])",
        "import dat.cli; dat.cli.main(['train'])",
    ],
)
def test_torch_is_imported_only_when_there_is_work(code: str) -> None:
    program = f"""
import sys
try:
    {code}
except SystemExit:
    pass
heavy = {{"torch", "numpy", "sklearn", "tensorboard"}} & set(sys.modules)
sys.exit(f"{{heavy}} came along" if heavy else 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
