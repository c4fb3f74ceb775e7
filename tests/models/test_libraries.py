"""Networks of timm, torchvision and transformers by name; ours against theirs with equal weights.

timm runs for real if it is installed, with stand-ins for torchvision if there is none; torchvision
runs for real if it is installed; transformers builds from a description and from a local folder.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dat.config.schema import RunConfig, merge, parse_edits
from dat.config.trust import named_code
from dat.core.settings import SettingError
from dat.models import NAME_PATTERNS, build_model, is_library, reads_hub, weights_info
from dat.models.layers import DropPath
from dat.models.vit import EncoderBlock
from tests.models.peers import import_timm, import_torchvision, in_fork

NAMES = ("timm/resnet18.a1_in1k", "timm/hf-hub:org/name", "torchvision/resnet50", "hf/org/name")
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}")


def images(size: int = 32, *, channels: int = 3) -> Tensor:
    return torch.rand(4, channels, size, size, generator=torch.Generator().manual_seed(1))


def perturbed(net: nn.Module) -> nn.Module:
    """With weights and statistics that are far from their initial values."""
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, value in net.state_dict().items():
            if value.dim() == 1:
                low = 0.5 if "var" in name or "weight" in name or "gamma" in name else -0.5
                value.uniform_(low, 1.0, generator=random)
    return net.eval()


def same_outputs(ours: nn.Module, theirs: nn.Module, *sizes: int) -> None:
    theirs.load_state_dict(perturbed(ours).state_dict())
    theirs.eval()
    for size in sizes:
        x = images(size).requires_grad_(True)
        outputs = [net(x) for net in (ours, theirs)]
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in outputs]
        torch.testing.assert_close(*outputs, **CLOSE)
        torch.testing.assert_close(*gradients, **CLOSE)


# Names


@pytest.mark.parametrize("name", NAMES)
def test_names_of_libraries_are_accepted_and_are_no_code(name: str) -> None:
    config = RunConfig.read({"model": {"name": name}})
    assert config.model.name == name
    assert is_library(name)
    assert named_code(config) == {}


def test_only_names_of_this_form_are_those_of_libraries() -> None:
    assert not any(is_library(name) for name in ("timm", "timm/", "nets/small", "timm.models:net"))
    assert [reads_hub(name) for name in NAMES] == [False, True, False, True]
    assert named_code(RunConfig.read({"model": {"name": "timm.models:resnet18"}})) != {}
    assert [shown for shown, _ in NAME_PATTERNS[2:]] == ["timm/NAME", "torchvision/NAME", "hf/NAME"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm/resnet18", "needs timm; run: pip install 'dat-robust[timm]'"),
        ("torchvision/resnet18", "needs torchvision; run: pip install 'dat-robust[torchvision]'"),
        ("hf/resnet", "needs transformers; run: pip install 'dat-robust[hf]'"),
    ],
)
def test_a_missing_package_is_one_line(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"^model.name = ") as error:
        build_model(name, 3)
    assert str(error.value).endswith(message) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("timm/resnet18", "checkpoint_path"),
        ("timm/resnet18", "pretrained_cfg"),
        ("timm/resnet18", "num_classes"),
        ("torchvision/resnet18", "weights"),
        ("hf/resnet", "trust_remote_code"),
        ("hf/resnet", "auto_map"),
        ("hf/resnet", "attn_implementation"),
    ],
)
def test_what_other_settings_determine_is_no_argument(name: str, key: str) -> None:
    with pytest.raises(ValueError, match=f"^model.args.{key}: "):
        build_model(name, 3, args={key: "x"})


# Settings


def test_arguments_are_typed_as_in_yaml_and_merged_one_by_one() -> None:
    words = ["model.name=timm/x", "model.args.drop_path_rate=1e-1", "model.args.depths=[1, 2]"]
    edits = parse_edits([*words, "model.args.act_layer=silu", "model.args.flag=true"])
    base = {"model": {"name": "timm/x", "args": {"drop_path_rate": 0.5, "kept": None}}}
    config = RunConfig.read(merge(base, edits))
    expected = {"drop_path_rate": 0.1, "kept": None, "depths": [1, 2], "act_layer": "silu"}
    assert dict(config.model.args) == expected | {"flag": True}
    assert RunConfig.read(config.dump()) == config
    shown = {row.path: row.value for row in config.rows()}
    again = RunConfig.read(parse_edits([f"model.args={shown['model.args']}", "model.name=timm/x"]))
    assert again.model.args == config.model.args


def test_another_network_drops_what_belongs_to_one() -> None:
    model = {"name": "timm/x", "width": 3, "args": {"a": 1}, "pretrained": True}
    base = {"model": model | {"mean": [0.5], "std": [1.0]}}
    assert merge(base, {"model": "cnn"}) == {"model": {"name": "cnn", "width": 3}}
    assert merge(base, {"model": {"pretrained": False}})["model"]["args"] == {"a": 1}
    for sized in ("wrn-34-10", "convnext-atto", "hf/org/name"):
        assert merge(base, {"model": sized}) == {"model": {"name": sized}}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ("model.pretrained=true", "model.pretrained = true: cnn comes without weights"),
        ("model.mean=0.5", "model: mean and std: give one number per channel"),
        ("model.std=0", "model.std = 0: must be above 0"),
        ("model.args.a=[1", "model.args.a = '[1': not YAML"),
        ("model.args.a={b: 1}", "model.args = {'a': {'b': 1}}: must be a group of named values"),
        ("model.args=3", "model.args = '3': must be a group of named values"),
        ("model.args.a-b=3", "model.args = {'a-b': 3}: must be a group of named values"),
        ("model.activation=tanh", "model.activation = 'tanh': must be one of relu, silu, gelu"),
        ("model.name=nets/small", "model.name = 'nets/small': must be cnn"),
    ],
)
def test_wrong_settings_of_a_model_are_one_line(edit: str, message: str) -> None:
    with pytest.raises(SettingError) as error:
        RunConfig.read(parse_edits([edit]))
    assert str(error.value).startswith(message)


def test_weights_of_a_library_or_a_file_may_be_asked_for() -> None:
    for value, expected in (("true", True), ("false", False), ("net.pt", "net.pt"), (True, True)):
        model = {"name": "timm/x", "pretrained": value}
        assert RunConfig.read({"model": model}).model.pretrained == expected


# timm


@pytest.mark.slow
@needs("timm")
@pytest.mark.parametrize(
    ("name", "peer", "options"),
    [
        ("convnext-tiny", "convnext_tiny", {"dims": (8, 16, 32, 64)}),
        ("resnet18", "resnet18", {}),
        ("resnet34", "resnet34", {}),
        ("resnet50", "resnet50", {}),
    ],
)
def test_ours_answers_as_timms_with_its_weights(
    name: str, peer: str, options: dict[str, Any]
) -> None:
    def check() -> None:
        theirs = import_timm().create_model(peer, num_classes=5, **options)
        same_outputs(build_model(name, 5, width=8 if options else 64), theirs, 64, 45)

    in_fork(check)


@pytest.mark.slow
@needs("timm")
def test_every_size_of_convnext_has_the_shapes_of_timms() -> None:
    def check() -> None:
        timm = import_timm()
        for size in ("atto", "femto", "pico", "nano", "tiny"):
            ours = build_model(f"convnext-{size}", 10).state_dict()
            theirs = timm.create_model(f"convnext_{size}", num_classes=10).state_dict()
            assert ours.keys() == theirs.keys()
            for key, value in ours.items():  # the MLPs of small ones are 1 x 1 convolutions
                assert value.numel() == theirs[key].numel(), key

    in_fork(check)


@pytest.mark.slow
@needs("timm")
def test_our_transformer_block_and_drop_path_are_timms() -> None:
    def check() -> None:
        timm = import_timm()
        from timm.models.vision_transformer import Block

        ours, theirs = EncoderBlock(64), Block(64, 1, qkv_bias=True)
        names = {"attention.qkv": "attn.qkv", "attention.out": "attn.proj", "hidden": "mlp.fc1"}
        names |= {"out": "mlp.fc2", "norm1": "norm1", "norm2": "norm2"}
        perturbed(ours)
        for name, name_in_timm in names.items():
            state = ours.get_submodule(name).state_dict()
            theirs.get_submodule(name_in_timm).load_state_dict(state)
        for module in theirs.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 1e-6
        x = torch.randn(3, 7, 64)
        torch.testing.assert_close(ours(x), theirs.eval()(x), **CLOSE)
        dropped = []
        for module in (DropPath(0.4), timm.layers.DropPath(0.4)):
            torch.manual_seed(3)
            dropped.append(module.train()(x))
        torch.testing.assert_close(*dropped)

    in_fork(check)


@pytest.mark.slow
@needs("timm")
def test_timms_networks_are_built_by_name(tmp_path: Path) -> None:
    def check() -> None:
        timm = import_timm()
        net = build_model("timm/convnext_atto", 5, channels=1, args={"drop_path_rate": 0.1})
        assert net.eval()(images(channels=1)).shape == (4, 5)
        info = weights_info("timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k", {})
        assert (info.classes, info.channels, info.size) == (1000, 3, 224)
        assert info.mean == (0.5, 0.5, 0.5) and info.std == (0.5, 0.5, 0.5)
        again = build_model("timm.models:resnet18", 5, channels=1)
        assert isinstance(again, timm.models.ResNet) and again.conv1.in_channels == 1
        for name, message in (
            ("timm/convnext_tyny", "timm has no such model: did you mean convnext_tiny?"),
            ("timm/resnet18.no_tag", "Invalid pretrained tag"),
        ):
            with pytest.raises(ValueError, match=message):
                build_model(name, 5)

    in_fork(check)


@pytest.mark.slow
@needs("timm")
def test_timms_weights_come_with_a_new_head(tmp_path: Path) -> None:
    """A folder as timm writes and uploads it."""

    def check() -> None:
        timm = import_timm()
        net = timm.create_model("resnet18", num_classes=7)
        timm.models.save_for_hf(net, tmp_path, safe_serialization=True)
        description = json.loads((tmp_path / "config.json").read_text())
        description["pretrained_cfg"] |= {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
        (tmp_path / "config.json").write_text(json.dumps(description))
        name = f"timm/local-dir:{tmp_path}"
        info = weights_info(name, {})
        assert (info.classes, info.mean, info.std) == (7, (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
        same, other = (build_model(name, classes, pretrained=True) for classes in (7, 3))
        for key, value in net.state_dict().items():
            assert torch.equal(same.state_dict()[key], value), key
            if not key.startswith("fc"):
                assert torch.equal(other.state_dict()[key], value), key
        assert other.eval()(images()).shape == (4, 3)

    in_fork(check)


# torchvision


@pytest.mark.slow
@needs("torchvision")
def test_torchvisions_networks_are_built_by_name() -> None:
    def check() -> None:
        torchvision = import_torchvision()
        info = weights_info("torchvision/resnet50", {})
        assert (info.classes, info.channels, info.size) == (1000, 3, 224)
        assert info.mean == (0.485, 0.456, 0.406) and info.std == (0.229, 0.224, 0.225)
        for name in ("resnet18", "resnet34", "resnet50"):
            same_outputs(
                build_model(name, 5), torchvision.models.get_model(name, num_classes=5), 45
            )
        grey = build_model("torchvision/mobilenet_v3_small", 5, channels=1).eval()
        assert grey(images(channels=1)).shape == (4, 5)
        for name, message in (
            ("torchvision/resnet19", "did you mean resnet18?"),
            ("torchvision/fasterrcnn_resnet50_fpn", "no such classification network"),
        ):
            with pytest.raises(ValueError, match=message):
                build_model(name, 5)

    in_fork(check)


# transformers

SMALL = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
PROCESSOR = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4], "do_normalize": True}
PROCESSOR |= {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 40}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A classifier of 7 classes, as `save_pretrained` writes it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("resnet", num_labels=7, **SMALL)
    transformers.AutoModelForImageClassification.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return tmp_path


@pytest.mark.slow
@needs("transformers")
def test_a_kind_of_network_of_transformers_is_built_from_its_sizes() -> None:
    net = build_model("hf/resnet", 5, channels=1, args=SMALL, seed=1).eval()
    assert net(images(channels=1)).shape == (4, 5)
    again = build_model("hf/resnet", 5, channels=1, args=SMALL, seed=1)
    for key, value in net.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])
    with pytest.raises(ValueError, match=r"model.args.nope: ResNetConfig has no such value"):
        build_model("hf/resnet", 5, args={"nope": 1})
    with pytest.raises(ValueError, match=r"model.args._name_or_path: .* has no such value"):
        build_model("hf/resnet", 5, args={"_name_or_path": "x"})


@pytest.mark.slow
@needs("transformers")
def test_transformers_weights_come_from_a_folder(folder: Path) -> None:
    import transformers

    name = f"hf/{folder}"
    theirs = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    ours = build_model(name, 7, pretrained=True).eval()
    torch.testing.assert_close(ours(images()), theirs(images()).logits)
    info = weights_info(name, {})
    assert (info.classes, info.channels, info.size) == (7, 3, 40)
    assert info.mean == pytest.approx((0.5, 0.4, 0.3))
    assert info.std == pytest.approx((0.2, 0.3, 0.4))
    other = build_model(name, 3, pretrained=True)
    for key, value in ours.state_dict().items():
        assert torch.equal(other.state_dict()[key], value) is ("classifier" not in key), key
    random = build_model(name, 7)
    key = "net.resnet.embedder.embedder.convolution.weight"
    assert not torch.equal(random.state_dict()[key], ours.state_dict()[key])


@pytest.mark.slow
@needs("transformers")
def test_what_a_folder_may_not_do(folder: Path) -> None:
    name, config = f"hf/{folder}", json.loads((folder / "config.json").read_text())
    wider = {**config, "embedding_size": 12}
    (folder / "config.json").write_text(json.dumps(wider))
    with pytest.raises(ValueError, match=r"the weights have no .* of this shape"):
        build_model(name, 7, pretrained=True)
    (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": "org/kernel"}))
    with pytest.raises(ValueError, match="only the attention implementations"):
        build_model(name, 7)
    code = {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config | code))
    (folder / "code.py").write_text("raise SystemExit('executed')")
    with pytest.raises(ValueError, match=r"trust_remote_code|custom code|own"):
        build_model(name, 7)
    (folder / "config.json").write_text(json.dumps(config))
    for changes, message in (
        ({"do_flip_channel_order": True}, "blue, green, red"),
        ({"image_mean": None}, "set model.mean and model.std"),
    ):
        values = {key: value for key, value in (PROCESSOR | changes).items() if value is not None}
        (folder / "preprocessor_config.json").write_text(json.dumps(values))
        with pytest.raises(ValueError, match=message):
            weights_info(name, {})
