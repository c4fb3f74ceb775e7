"""Files for clusters: valid scripts and manifests, without code injection."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from dat.cli import main
from dat.jobs.clusters import ClusterJob, Queue, commands, manifest, ray_script, script
from dat.jobs.clusters.job import name_of

EVIL = "runs/it's $(touch owned) `touch owned` \"; touch owned # ä"
JOB = ClusterJob(recipe="my.yaml", settings=("attack.steps=5",), nodes=6, devices=6, name="mine")


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


def test_the_script_is_valid_bash(tmp_path: Path) -> None:
    text = script(JOB, Queue(partition="gpu", account="lab-1"))
    file = tmp_path / "job.sh"
    file.write_text(text)
    subprocess.run(["bash", "-n", str(file)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(file)], check=True)
    directives = [line.split(maxsplit=1)[1] for line in text.splitlines() if "#SBATCH" in line]
    assert {
        *("--job-name=mine", "--nodes=6", "--ntasks-per-node=1", "--gpus-per-node=6", "--requeue"),
        *("--signal=B:TERM@120", "--partition=gpu", "--account=lab-1", "--open-mode=append"),
    } <= set(directives)
    assert text.startswith("#!/bin/bash\n#SBATCH ") and "@" not in text.replace(
        "TERM@1", ""
    ).replace("[@]", "")


def test_user_input_is_never_executed(tmp_path: Path) -> None:
    """The arguments arrive unchanged, and nothing in them runs."""
    job = ClusterJob(recipe="a b.yaml", settings=(f"about={EVIL}",), name="x", out=EVIL)
    text = script(job, Queue())
    lines = [line for line in text.splitlines() if line.startswith(("run=", "train=("))]
    echo = "\n".join([*lines, 'printf "%s\\0" "$run" "${train[@]}"'])
    done = subprocess.run(["bash", "-c", echo], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == [EVIL, *job.train]
    assert list(tmp_path.iterdir()) == []
    names: dict[str, Any] = {}
    (line,) = [line for line in ray_script(job).splitlines() if line.startswith("JOB = ")]
    exec(f"import json\n{line}", names)
    assert (names["JOB"]["out"], names["JOB"]["settings"]) == (EVIL, list(job.settings))
    parsed = yaml.safe_load(manifest(job, "dat:1"))
    assert parsed["spec"]["trainer"]["command"][-len(job.train) :] == job.train


def test_every_node_has_a_command() -> None:
    job = ClusterJob(nodes=2, devices=4, interface="eth1", name="two")
    first, second = commands(job, ["10.0.0.1", "10.0.0.2"])
    assert first[:4] == [
        *("env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"),
        *("GLOO_SOCKET_IFNAME=eth1", "NCCL_SOCKET_IFNAME=eth1"),
    ]
    options = dict(pairwise(first))
    assert (options["--nnodes"], options["--nproc-per-node"]) == ("2", "4")
    assert options["--rdzv-endpoint"] == "10.0.0.1:29500" and options["--rdzv-id"] == "two"
    assert [(a, b) for a, b in zip(first, second, strict=True) if a != b] == [
        ("is_host=1", "is_host=0"),
        ("10.0.0.1", "10.0.0.2"),
    ]


def test_a_train_job() -> None:
    job = ClusterJob(nodes=6, devices=6, name="mine", out="/runs/mine", interface="eth0")
    made = yaml.safe_load(manifest(job, "reg.here:5000/dat:1", volume="runs"))
    assert (made["apiVersion"], made["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert made["metadata"] == {"name": "mine"}
    trainer = made["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (6, 6)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 6}
    assert trainer["command"][:5] == ["torchrun", "--max-restarts", "3", "--rdzv-id", "mine"]
    assert {"name": "GLOO_SOCKET_IFNAME", "value": "eth0"} in trainer["env"]
    (override,) = made["spec"]["podTemplateOverrides"]
    (container,) = override["spec"]["containers"]
    (volume,) = override["spec"]["volumes"]
    assert override["targetJobs"] == [{"name": "node"}] and container["name"] == "node"
    assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/runs"}]
    assert volume["persistentVolumeClaim"] == {"claimName": "runs"}


def test_a_pytorch_job() -> None:
    job = ClusterJob(nodes=6, devices=2, name="mine", gpus=False)
    made = yaml.safe_load(manifest(job, "dat:1", kind="pytorchjob", volume="runs"))
    assert (made["apiVersion"], made["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert made["spec"]["nprocPerNode"] == "2"
    roles: dict[str, Any] = made["spec"]["pytorchReplicaSpecs"]
    assert {name: role["replicas"] for name, role in roles.items()} == {"Master": 1, "Worker": 5}
    for role in roles.values():
        assert role["restartPolicy"] == "OnFailure"
        (container,) = role["template"]["spec"]["containers"]
        assert container["name"] == "pytorch" and container["resources"]["limits"] == {"cpu": 2}
        assert container["volumeMounts"][0]["mountPath"] == "/runs"
    alone = yaml.safe_load(manifest(ClusterJob(nodes=1), "dat:1", kind="pytorchjob"))
    assert list(alone["spec"]["pytorchReplicaSpecs"]) == ["Master"]


def test_job_names_are_derived_from_paths() -> None:
    assert name_of("runs/My Run_2/") == "my-run-2"
    assert name_of("///") == "dat"
    assert name_of("x" * 80) == "x" * 50


def test_the_commands_print_and_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("digits", "--nodes", "2", "--devices", "3", "attack.steps=5")
    code, out, _ = call(capsys, "launch", "slurm", *words)
    assert code == 0 and "train=(train digits attack.steps=5 --out runs/digits)" in out
    code, out, _ = call(capsys, "launch", "slurm", *words, "--file", "job.sh")
    assert code == 0 and out == "job.sh: start it with sbatch job.sh\n"
    assert (tmp_path / "job.sh").read_text().startswith("#!/bin/bash")
    code, out, _ = call(capsys, "launch", "kubernetes", *words, "--image", "dat:1", "--json")
    assert yaml.safe_load(json.loads(out)["text"])["metadata"]["name"] == "digits"
    code, out, _ = call(capsys, "launch", "torchrun", "digits", "--hosts", "a,b", "--cpu")
    lines = [shlex.split(line) for line in out.splitlines() if line and line[0] != "#"]
    assert (
        code == 0
        and [line[-6:] for line in lines]
        == [["-m", "dat", "train", "digits", "--out", "runs/digits"]] * 2
    )


SETUP = "export GREETING='hello there'\nTWICE=$GREETING"


def test_setup_commands_run_before_the_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.sh").write_text(f"{SETUP}\n")
    for setup in (SETUP, "setup.sh"):
        code, out, _ = call(capsys, "launch", "slurm", "digits", "--nodes", "2", "--setup", setup)
        assert code == 0
        subprocess.run(["bash", "-n"], input=out, text=True, check=True)
        assert out.index("#SBATCH") < out.index(SETUP) < out.index("set -uo") < out.index("srun")
    words = ("launch", "torchrun", "digits", "--hosts", "a,b", "--setup", "setup.sh")
    code, out, _ = call(capsys, *words)
    assert code == 0 and out.startswith(f"# on a\n{SETUP}\nenv ")
    subprocess.run(["bash", "-n"], input=out, text=True, check=True)


@pytest.mark.parametrize("kind", ["trainjob", "pytorchjob"])
def test_setup_commands_run_in_the_pod(kind: str, tmp_path: Path) -> None:
    """Only they are read by a shell: the arguments after them arrive unchanged."""
    job = ClusterJob(settings=(f"about={EVIL}",), setup=SETUP)
    parsed = yaml.safe_load(manifest(job, "dat:1", kind=kind))
    spec = parsed["spec"]
    if kind == "trainjob":
        command = spec["trainer"]["command"]
    else:
        pod = spec["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
        command = pod["containers"][0]["command"]
    assert command[:2] == ["bash", "-c"] and command[4] == "torchrun"
    show = ["sh", "-c", 'printf "%s\\0" "$GREETING" "$@"', "sh", *command[4:]]
    done = subprocess.run([*command[:4], *show], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == ["hello there", *command[4:]]
    assert list(tmp_path.iterdir()) == []


def test_gpus_are_requested_only_if_the_recipe_uses_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("launch", "slurm", "digits", "--nodes", "2", "--devices", "3")
    for more, expected in (((), True), (("comm.device=cpu",), False), (("--cpu",), False)):
        code, out, _ = call(capsys, *words, *more)
        assert code == 0 and ("--gpus-per-node=3" in out) == expected


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ("", True),
        ("--volume-claim mine", False),
        ("--volume mine --out /runs/a/b", False),
        ("--volume-claim mine --out runs/a", True),
        ("--volume-claim mine --out /runs-of-others/a", True),
        ("--out /runs/a", True),
    ],
)
def test_checkpoints_that_die_with_the_pod_give_a_warning(
    words: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("launch", "kubernetes", "digits", "--nodes", "2", "--image", "dat:1")
    code, out, err = call(capsys, *common, *words.split())
    assert code == 0 and yaml.safe_load(out)["kind"] == "TrainJob"
    assert err.startswith("warning: checkpoints are lost with their pod") == warned
    assert len(err.splitlines()) == int(warned)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("slurm digts --nodes 2", "unknown recipe 'digts': did you mean digits?"),
        ("slurm digits --nodes 2 attack.step=5", "unknown setting attack.step"),
        ("slurm digits --nodes 2 --name a;b", "--name 'a;b': must be at most 50 lowercase letters"),
        ("slurm digits --nodes 2 --time soon", "--time 'soon': must be like 90, 24:00:00"),
        ("slurm digits --nodes 2 --partition a$b", "--partition 'a$b': must be letters"),
        ("slurm digits --nodes 2 --interface $(x)", "--interface '$(x)': not a valid interface"),
        ("slurm digits --nodes 2 --grace 5", "grace = 5: must be at least 30"),
        ("slurm digits --nodes 2 --port 80", "port = 80: must be at least 1024"),
        ("torchrun digits --hosts a;b", "--hosts 'a;b': not a valid host name or address"),
        ("torchrun digits --hosts a,a", "--hosts: 1 different hosts for --nodes 2"),
        ("kubernetes digits --nodes 2 --image $(x)", "--image '$(x)': not a valid image name"),
        (
            "kubernetes digits --nodes 2 --image dat:1 --volume A",
            "--volume-claim 'A': not a valid name",
        ),
        ("slurm digits --nodes 2 --setup (", "--setup: not complete commands of bash (line"),
        ("slurm digits --nodes 2 --setup 'x", "--setup: not complete commands of bash (line"),
        ("slurm digits --nodes 2 --setup x<<A", "--setup: not complete commands of bash (line"),
        ("slurm digits --nodes 2 --setup x\\", "commands of bash (it ends in a backslash)"),
        ("slurm digits --nodes 2 --setup a\x07", "--setup: must be lines of printable"),
        ("slurm digits --nodes 2 --cpu comm.device=cuda", "--cpu: the recipe needs GPUs"),
        (
            "slurm digits --nodes 2 --devices 3 protocol.name=hybrid protocol.inside=4",
            "protocol.inside = 4: must divide the number of workers, 6",
        ),
    ],
)
def test_invalid_input_gives_a_one_line_error(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "launch", *words.split())
    assert code == 2 and message in err, err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_a_recipe_under_ray(tmp_path: Path) -> None:
    """Two workers; a second run is refused."""
    if importlib.util.find_spec("ray") is None:
        compile(ray_script(ClusterJob()), "job.py", "exec")
        pytest.skip("needs pip install ray[train]; only compiled")
    settings = ("train.epochs=1", "model.width=4", "attack.steps=1", "evaluate.attacks=pgd-1")
    job = ClusterJob(settings=(*settings, "evaluate.report=0"), nodes=2, out="run", gpus=False)
    (tmp_path / "job.py").write_text(ray_script(job))
    command = [sys.executable, "job.py"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["workers"] == 2
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 1 and "run is complete" in again.stderr


SRUN = """#!/bin/bash
# replaces srun: one task per node, on this machine; an error ends them all
while [[ $1 == --* ]]; do shift; done
for node in $(scontrol show hostnames); do
    "$@" &
    echo $! >> tasks
done
code=0
for pid in $(cat tasks); do wait "$pid" || code=1; done
rm tasks
exit $code
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) printf 'localhost\\nlocalhost\\n' ;;
    requeue) echo "$2" >> requeued ;;
esac
"""
SCANCEL = """#!/bin/bash
echo "$@" >> cancelled
kill -TERM $(cat tasks)
"""


def fake_slurm(folder: Path, torchrun: str, state: str = "RUNNING") -> dict[str, str]:
    """Write fake SLURM commands and torchrun. Returns the environment of a job that uses them."""
    tools = {"srun": SRUN, "scontrol": SCONTROL, "scancel": SCANCEL}
    tools |= {"squeue": f"#!/bin/bash\necho {state}\n", "torchrun": torchrun}
    (folder / "bin").mkdir()
    for name, text in tools.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "both",
    }


@pytest.mark.parametrize(
    ("does", "state", "requeued", "code"),
    [
        ("mkdir -p 'my run/checkpoints/00000007'; exit 1", "RUNNING", True, 1),  # a signal
        ("mkdir -p 'my run/checkpoints/00000007'; exit 1", "COMPLETING", False, 1),  # cancelled
        ("exit 1", "RUNNING", False, 1),  # no progress
        ("mkdir -p 'my run'; touch 'my run/result.json'", "RUNNING", False, 0),
    ],
)
def test_only_a_job_that_made_progress_is_requeued(
    tmp_path: Path, does: str, state: str, requeued: bool, code: int
) -> None:
    environment = fake_slurm(tmp_path, f'#!/bin/bash\necho "$@" >> words\n{does}\n', state)
    (tmp_path / "my run" / "checkpoints" / "00000005").mkdir(parents=True)
    text = script(ClusterJob(nodes=2, out="my run"), Queue())
    done = subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert (tmp_path / "requeued").exists() == requeued
    first, second = (tmp_path / "words").read_text().splitlines()
    assert first == second and first.endswith("-m dat train --resume my run")


@pytest.mark.slow
def test_a_script_is_stopped_requeued_and_resumed(tmp_path: Path) -> None:
    """The real script and the real torchrun on two "nodes", with fake SLURM commands."""
    from tests.faults.test_death import SETTINGS, reached, wait_for

    torchrun = f'#!/bin/bash\nexec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"\n'
    environment = fake_slurm(tmp_path, torchrun)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = ClusterJob(
        settings=SETTINGS, nodes=2, out="my run", interface="lo", port=port, gpus=False
    )
    (tmp_path / "job.sh").write_text(script(job, Queue()))

    def submit() -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "job.sh"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    first = submit()
    try:
        wait_for(tmp_path / "my run", 6, first)
        first.terminate()  # the shell only, like --signal=B:TERM
        first.communicate(timeout=120)
        assert (tmp_path / "requeued").read_text().split() == [str(os.getpid())]
        cancelled = (tmp_path / "cancelled").read_text().split()
        assert cancelled == ["--signal=TERM", "--state=RUNNING", str(os.getpid())]
        saved = reached(tmp_path / "my run")
        assert first.returncode != 0 and 6 <= saved < 3 * 26
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
    second = submit()
    _, err = second.communicate(timeout=300)
    assert second.returncode == 0, err
    assert (tmp_path / "my run" / "result.json").is_file()
    third = submit()
    out, _ = third.communicate(timeout=60)
    assert (third.returncode, out) == (0, "my run is complete\n")
