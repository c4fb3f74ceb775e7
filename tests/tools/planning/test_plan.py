"""`dat plan`: its predictions, its recommendation, its options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from dat.cli import main
from dat.config.recipes import names
from dat.config.recipes import read as read_recipe
from dat.config.schema import RunConfig
from dat.data import Splits
from dat.distributed import Buckets, Quantizer, WholeVector
from dat.tools.planning import Cluster, ComputeTimes, Costs, NetworkLink, predict
from dat.tools.planning import recipe as profiles
from dat.tools.planning.advice import (
    Alternative,
    Scheme,
    estimate,
    possible_schemes,
    recommend,
)
from dat.tools.planning.cluster import read_rate
from dat.tools.planning.costs import fingerprint, load, read, save
from dat.tools.planning.datasets import KNOWN_DATASETS, DatasetShape
from dat.tools.planning.gradient import even, slots_of
from dat.tools.planning.memory import (
    Activations,
    count_activations,
    estimate_memory,
    optimizer_states,
)
from dat.tools.planning.recipe import RecipeProfile, find_shape
from dat.tools.planning.scaling import scale, sizes
from dat.tools.planning.timing import (
    TimedSteps,
    measure,
    passes,
    random_images,
    split_by_passes,
    timed_steps,
)

SMALL = ("model.width=4", "train.batch=96", "attack.steps=1", "comm.threads=1")


def make_profile(values: int = 25_000_000, backward: float = 0.5) -> RecipeProfile:
    """The backward pass of the update takes a third of the step."""
    return RecipeProfile(
        config=read_recipe("digits", {"train": {"batch": 512}}),
        shape=DatasetShape(10, (3, 32, 32), 50_000),
        gradient=even(values, 50),
        compute=ComputeTimes(images=32, before=backward, forward=backward, backward=backward),
        activations=Activations(0.0, 1e6),
        measured=False,
    )


def accelerated_cluster(nodes: int, link: str, devices: int = 1) -> Cluster:
    return Cluster(
        nodes=nodes,
        devices=devices,
        link=NetworkLink.named(link),
        inside=NetworkLink.named("100gbit"),
        cores=64,
        accelerated=True,
    )


def alternatives(cluster: Cluster, backward: float = 0.5) -> list[Alternative]:
    profile = make_profile(backward=backward)
    return [
        estimate(profile, cluster, scheme, costs=Costs(), share=32)
        for scheme in possible_schemes(profile, cluster, ("bits", "protocol"))
    ]


def test_a_fast_link_needs_no_compression() -> None:
    assert recommend(alternatives(accelerated_cluster(8, "400gbit"))).name == "dense, 32 bits"


def test_a_slow_link_wants_few_bits_and_no_server() -> None:
    chosen = recommend(alternatives(accelerated_cluster(8, "100mbit"))).step
    assert (chosen.protocol, chosen.bits) == ("chunked", 4)


def test_where_8_bits_are_hidden_4_are_not_asked_for() -> None:
    chosen = recommend(alternatives(accelerated_cluster(8, "1gbit"), backward=1.0)).step
    assert (chosen.protocol, chosen.bits) == ("chunked", 8)


def test_a_ring_of_many_is_too_coarse_to_be_recommended() -> None:
    found = alternatives(accelerated_cluster(64, "1gbit"))
    assert any(it.step.protocol == "ring" for it in found)
    assert recommend(found).step.protocol != "ring"


def test_of_few_nodes_with_many_devices_the_hierarchy_is_fastest() -> None:
    found = alternatives(accelerated_cluster(8, "10gbit", devices=8))
    fastest = min((it for it in found if it.step.bits == 8), key=lambda it: it.step.step)
    assert fastest.step.protocol == "hybrid"


def test_scaling_bends_where_the_link_does_and_says_so() -> None:
    profile, cluster = make_profile(), accelerated_cluster(4, "1gbit")
    dense = Scheme("dense", Buckets())
    weak = scale(profile, cluster, dense, costs=Costs(), kind="weak", batch=128)
    strong = scale(profile, cluster, dense, costs=Costs(), kind="strong", batch=128)
    assert [it.workers for it in weak.points] == sizes(cluster)
    assert weak.points[0].efficiency == pytest.approx(1)
    assert [it.share for it in strong.points] == [128 / it.nodes for it in strong.points]
    assert strong.points[-1].share >= 1
    for curve in (weak, strong):
        last = [it.efficiency for it in curve.points]
        assert last == sorted(last, reverse=True)
    bend = weak.bend
    assert bend is not None and bend.workers == 2
    assert "the link between nodes" in weak.explain()
    fine = scale(
        profile, accelerated_cluster(4, "400gbit"), dense, costs=Costs(), kind="weak", batch=128
    )
    assert fine.bend is None or fine.bend.workers > 500


@pytest.mark.parametrize(
    ("protocol", "quantizer", "low", "high", "paper"),
    [
        ("dense", Buckets(), 0.6, 0.75, 898),
        ("gather", WholeVector(bits=16), 0.95, 1.2, 850),
        ("gather", WholeVector(bits=8), 0.7, 0.9, 592),
        ("server", WholeVector(bits=8), 0.8, 1.0, 1091),
    ],
)
def test_the_papers_communication_is_within_reach(
    protocol: str, quantizer: Quantizer, low: float, high: float, paper: float
) -> None:
    """Table 4: 6 nodes, 1 Gbit/s, 417 steps. The paper's ring reached two thirds of the link's
    rate, and its quantizer was slow."""
    found = predict(
        even(25_557_032, 160),
        ComputeTimes(images=512, backward=0.44),
        protocol=protocol,
        quantizer=quantizer,
        cluster=accelerated_cluster(6, "1gbit"),
        costs=Costs(),
    )
    assert low < 417 * found.communication / paper < high


def test_rates_are_read() -> None:
    assert read_rate("2.5gbit") == 2.5e9
    assert read_rate("100Mbit") == 1e8
    assert read_rate("unshaped") == float("inf")
    for wrong in ("fast", "1", "0gbit", "-1gbit", "gbit"):
        with pytest.raises(ValueError, match="must be a number with mbit or gbit"):
            read_rate(wrong)


def test_a_given_step_is_divided_by_its_passes() -> None:
    config = read_recipe("imagenet")
    assert passes(config) == 4
    found = split_by_passes(config, 11.0, 85.3)
    assert (found.before, found.forward, found.backward) == pytest.approx((8, 1, 2))
    assert found.of(2 * found.images).total == pytest.approx(22)
    assert passes(read_recipe("digits-standard")) == 0


def test_known_sets_need_not_be_here() -> None:
    assert find_shape(read_recipe("imagenet")) == KNOWN_DATASETS["imagenet"]
    small = read_recipe("imagenet", {"data": {"size": 64}})
    assert find_shape(small).image == (3, 64, 64)
    assert find_shape(read_recipe("digits")).total == 1437
    with pytest.raises(ValueError, match="without data, plan with one of imagenet"):
        find_shape(read_recipe("digits", {"data": {"name": "nowhere.npz"}}))


def test_activations_are_what_autograd_saves() -> None:
    """For two linear layers: the images and the output of the ReLU."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 7, bias=False), nn.ReLU(), nn.Linear(7, 5))
    found = count_activations(model, (3, 2, 2))
    assert found == Activations(0.0, 4 * (12 + 7))
    assert count_activations(model.to("meta"), (3, 2, 2)) == found


def test_memory_adds_up() -> None:
    config = read_recipe("digits", {"train": {"ema": 0.9}})
    assert optimizer_states(config) == 2
    assert optimizer_states(read_recipe("digits", {"optimizer": {"name": "lars"}})) == 1
    found = estimate_memory(
        config, values=10, activations=Activations(3.0, 2.0), pixels=5, images=8, exchange=7
    )
    assert (found.weights, found.optimizer, found.copies) == (40, 80, 80)
    assert (found.activations, found.exchange) == (3 + 16, 7)
    assert found.total == 40 + 40 + 80 + 80 + 7 + 19 + 4 * 8 * 4 * 5


def test_memory_of_activations_is_that_of_a_real_pass() -> None:
    from dat.models import build_model

    model = build_model("cnn", 10, channels=1, width=8)
    found = count_activations(model, (1, 28, 28))
    assert found.per_image > 4 * 28 * 28
    parameters = {it.untyped_storage().data_ptr() for it in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda it: it):
        result = model(torch.rand(16, 1, 28, 28))
    assert found.fixed + 16 * found.per_image == pytest.approx(sum(kept.values()), rel=0.05)
    del result


def test_costs_of_another_machine_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load() == Costs()
    mine = replace(Costs(), byte=3e-9, origin="measured", machine=fingerprint())
    path = tmp_path / "dat" / "costs.json"
    save(mine, path)
    assert load() == mine == read(path)
    save(replace(mine, machine="another"), path)
    assert load() == Costs()
    path.write_text("{}")
    with pytest.raises(ValueError, match="not a calibration; create one with dat plan"):
        load()
    assert mine.kernel("encode", 3) == mine.kernels["encode"][4]
    assert mine.kernel("encode", 8) == mine.kernels["encode"][8]


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.fixture(autouse=True)
def no_calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_plan_is_measured_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "digits", *SMALL, "--nodes", "4", "--link", "100mbit", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["compute"]["measured"] and found["compute"]["backward"] > 0
    assert found["costs"]["origin"] == "built in"
    rows = {(it["protocol"], it["bits"]): it for it in found["alternatives"]}
    assert set(rows) == {
        *((name, 32) for name in ("dense", "gather", "server", "chunked")),
        *((name, 8) for name in ("gather", "server", "chunked", "ring")),
        *((name, 4) for name in ("gather", "server", "chunked")),
    }
    for row in rows.values():
        assert row["step_seconds"] >= row["without_exchange_seconds"] > 0
        assert row["epoch_seconds"] == pytest.approx(row["steps"] * row["step_seconds"])
        assert row["memory_bytes"] == sum(row["memory"].values())
    assert rows["chunked", 4]["bytes"] < rows["chunked", 8]["bytes"] < rows["dense", 32]["bytes"]
    chosen = found["recommended"]
    assert (chosen["protocol"], chosen["bits"]) in rows
    assert found["why"].startswith(f"{chosen['protocol']}, {chosen['bits']} bits")


def test_scaling_is_shown_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    where = ("--nodes", "6", "--devices", "2", "--link", "1gbit", "--compute", "0.5")
    code, out, err = call(
        capsys, "digits", *where, "--sweep", "nodes,bits,protocol", "--plot", str(picture)
    )
    assert (code, err) == (0, "")
    assert "built-in values (" in out and "measures this machine" in out
    assert "weak scaling, dense, 32 bits" in out and "Strong scaling" in out
    assert "hybrid" in out and "4,096" in out
    assert out.splitlines()[-1].startswith("Recommended: ")
    assert "<svg" in picture.read_text()


@pytest.mark.parametrize("recipe", names())
def test_every_recipe_is_planned_without_its_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    """Only passes are not run, as those of a large network take seconds."""

    def absent(name: str, reading: object) -> Splits:
        raise ValueError(f"{name} is not on this machine")

    def timed(config: RunConfig, data: Splits, steps: TimedSteps, devices: int) -> ComputeTimes:
        return ComputeTimes(images=steps.images, backward=0.1)

    monkeypatch.setattr(profiles, "load", absent)
    monkeypatch.setattr(profiles, "seconds_per_image", lambda model, x: 0.1)
    monkeypatch.setattr(profiles, "measure", timed)
    monkeypatch.setattr(
        profiles,
        "watch_backward",
        lambda model, *rest, **options: even(sum(slot.length for slot in slots_of(model).values())),
    )
    where = ("--nodes", "6", "--devices", "6", "--link", "1gbit")
    code, out, err = call(capsys, recipe, *where, "--json")
    assert (code, err) == (0, "")
    config, found = read_recipe(recipe), json.loads(out)
    images = round(KNOWN_DATASETS[config.data.name].total * (1 - config.data.holdout))
    assert {row["steps"] for row in found["alternatives"]} == {round(images / config.train.batch)}


def test_random_crops_need_no_pictures_and_limits_no_images() -> None:
    config = read_recipe("digits", {"model": {"width": 4}, "comm": {"threads": 1}})
    data_config = replace(config.data, augmentation="resized-crop", limit=500)
    config = replace(config, data=data_config)
    data = random_images((1, 8, 8), 10, 2)
    found = measure(config, data, TimedSteps(images=2, steps=1, warmup=1), devices=1)
    assert found.images == 2 and found.backward > 0


def test_slow_networks_are_timed_with_few_images() -> None:
    config = read_recipe("imagenet")
    assert timed_steps(config, per_image=1e-3, share=85) == TimedSteps(images=64)
    assert timed_steps(config, per_image=1e-3, share=3) == TimedSteps(images=3)
    assert timed_steps(config, per_image=1.0, share=85) == TimedSteps(2, steps=1, warmup=1)


def test_a_model_that_exceeds_the_memory_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiles, "host_memory", lambda: 10**6)
    code, _, err = call(capsys, "digits", "--nodes", "4", "--link", "1gbit")
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("error: model.name = cnn: a step of 2 images needs about 0.0 GB")
    assert line.endswith("run dat plan on a machine with more memory")


def test_image_sizes_of_training_are_planned_one_by_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("--nodes", "4", "--compute", "1", "--link", "100gbit", *SMALL, "train.epochs=10")
    sizes = ("train.resize=4,6", "train.resize_until=5,8")
    code, out, err = call(capsys, "digits", *words, *sizes, "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)["sizes"]
    assert [(row["size"], row["epochs"]) for row in rows] == [(4, 5), (6, 3), (8, 2)]
    for row in rows:
        alone = row["without_exchange_seconds"]
        assert alone == pytest.approx(row["ratio"], rel=0.01)
    assert rows[-1]["ratio"] == 1
    code, out, _ = call(capsys, "digits", *words, *sizes)
    assert code == 0 and "Step by image size (train.resize)" in out and "All epochs: " in out
    code, _, err = call(capsys, "digits", *words, *sizes, "train.epochs=8")
    assert code == 2 and "train.resize_until = 5, 8: must be below train.epochs = 8" in err


def test_labels_that_are_left_out_shorten_an_epoch() -> None:
    profile = make_profile()
    few = replace(profile.config, data=replace(profile.config.data, labels=1000, holdout=0.1))
    assert replace(profile, config=few).images == 900


def test_bits_can_be_swept_over_alone(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nodes", "3", "--compute", "1", "--sweep", "bits", "--json")
    code, out, _ = call(capsys, "digits", *words)
    assert code == 0
    found = [(it["protocol"], it["bits"]) for it in json.loads(out)["alternatives"]]
    assert found == [("dense", 32), *(("chunked", bits) for bits in (16, 8, 6, 4, 3, 2))]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "specify a recipe to plan for"),
        (("digits", "--calibrate"), "--calibrate: measures this machine; omit the recipe digits"),
        (("digits", "--link", "fast"), "link 'fast': must be a number with mbit or gbit"),
        (("digits", "--sweep", "color"), "--sweep color: must be one or more of bits"),
        (("digits", "--compute", "0"), "--compute 0.0: must be above 0"),
        (("digits", "--cores", "0"), "--cores 0.0: must be above 0"),
        (("digits", "--latency", "-1"), "--latency -1.0: must be at least 0"),
        (("digits", "--nodes", "200000"), "--nodes 200000: must be 1 to 100,000"),
        (("digits", "--nodes", "999", "train.batch=500"), "train.batch = 500: must be at least"),
        (("digits", "--plot", "plan.doc"), "plan.doc: a plot is written to a file that ends"),
        (("digit",), "unknown recipe 'digit'"),
    ],
)
def test_bad_input_gets_one_clear_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    code, _, err = call(capsys, *words)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("error: ") and message in line
