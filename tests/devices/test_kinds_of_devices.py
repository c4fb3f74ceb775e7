"""Only `dat.core.devices` knows kinds of devices, as far as the source tells."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import dat

SOURCE = Path(dat.__file__).parent
OWNER = SOURCE / "core" / "devices.py"
FILES = [path for path in sorted(SOURCE.rglob("*.py")) if path != OWNER]
KINDS = ("cuda", "xpu", "mps", "hip", "hpu", "mtia")
"""`cpu` is none of them: every module may keep data in host memory."""
MODULES = (*KINDS, "accelerator")
"""Of torch."""
PINNING = "pin_memory"


def knowledge(tree: ast.AST) -> Iterator[str]:
    """Each place that knows a kind of device."""
    for node in ast.walk(tree):
        found = ""
        if isinstance(node, ast.Attribute):
            found = of_attribute(node)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [alias.name for alias in node.names]
            module = getattr(node, "module", None) or ""
            full = [f"{module}.{name}".strip(".") for name in names]
            found = " ".join(name for name in full if of_torch(name))
        elif isinstance(node, ast.Compare):
            found = of_comparison(node)
        elif isinstance(node, ast.Call):
            found = of_call(node)
        elif isinstance(node, ast.MatchValue | ast.Dict):
            found = of_choice(node)
        elif isinstance(node, ast.keyword):  # what `devices.pins_memory` says may be passed on
            fixed = node.arg == PINNING and isinstance(node.value, ast.Constant)
            found = ast.unparse(node) if fixed else ""
        if found:
            yield f"line {getattr(node, 'lineno', 0)}: {found}"


def of_torch(dotted: str) -> bool:
    words = dotted.split(".")
    return words[0] == "torch" and any(word in MODULES for word in words[1:])


def of_attribute(node: ast.Attribute) -> str:
    dotted = ast.unparse(node)
    pinned = node.attr in (PINNING, "is_pinned", "is_cuda", "is_xpu", "is_mps")
    return dotted if of_torch(dotted) or pinned else ""


def of_comparison(node: ast.Compare) -> str:
    """`x.type == "cuda"`, `kind in ("cuda", "mps")`."""
    sides = [node.left, *node.comparators]
    typed = any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides)
    words = texts(leaf for side in sides for leaf in ast.walk(side))
    kinds = [text for text in words if text in KINDS or (typed and text == "cpu")]
    return ast.unparse(node) if kinds else ""


def of_choice(node: ast.MatchValue | ast.Dict) -> str:
    """`case "cuda":`, `{"cuda": ...}[kind]`."""
    choices = [node.value] if isinstance(node, ast.MatchValue) else node.keys
    kinds = [choice for choice in choices if isinstance(choice, ast.Constant)]
    return ast.unparse(node) if any(kind.value in KINDS for kind in kinds) else ""


def texts(nodes: Iterable[ast.AST]) -> list[str]:
    constants = (node.value for node in nodes if isinstance(node, ast.Constant))
    return [value for value in constants if isinstance(value, str)]


def of_call(node: ast.Call) -> str:
    """`x.cuda()`, `torch.device("cuda")`, `x.to("cuda:0")`."""
    if isinstance(node.func, ast.Attribute) and node.func.attr in KINDS:
        return ast.unparse(node)
    named = any(text.split(":")[0] in KINDS for text in texts(node.args))
    return ast.unparse(node) if named else ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_other_module_knows_kinds_of_devices(path: Path) -> None:
    assert list(knowledge(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "torch.backends.cuda.matmul.allow_tf32 = True",
        "import torch.mps",
        "from torch.accelerator import current_stream",
        "from torch import xpu",
        "x.device.type == 'cuda'",
        "x.device.type != 'cpu'",
        "'cuda' in kinds",
        "kind in ('cuda', 'mps')",
        "x.pin_memory()",
        "x.is_cuda",
        "x.cuda()",
        "x.to('cuda:1')",
        "torch.device('xpu')",
        "{'cuda': 8192}[kind]",
        "match kind:\n    case 'cuda':\n        pass",
        "DataLoader(data, pin_memory=True)",
    ],
)
def test_knowledge_is_noticed(line: str) -> None:
    assert len(list(knowledge(ast.parse(line)))) > 0


@pytest.mark.parametrize(
    "line", ["x.to(device)", "torch.device('cpu')", "path.type == 'file'", "devices.choose(name)"]
)
def test_other_code_is_not_confused_with_it(line: str) -> None:
    assert list(knowledge(ast.parse(line))) == []


def test_the_owner_knows_them() -> None:
    assert list(knowledge(ast.parse(OWNER.read_text())))
