"""Algorithm Distillation, trained: on any number of processes, killed, by every launcher."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import programs
import runs
from ad import evaluate, train, windows
from ad.config import Config, read
from conftest import ROOT
from ddp_utils import UserError
from ddp_utils import run as run_
from ranks import ranks, run_ranks

BIN = Path(sys.executable).parent
SCRIPT = str(ROOT / "src/ad/train.py")
# 25 goals, 3 of them held out; 12 episodes of 6 steps, of which the model sees 4
SMALL = runs.words(
    """grid_size=5 horizon=6 n_stream=4 total_source_timesteps=288 train_n_stream=4
train_source_timesteps=72 n_transit=24 tf_n_embd=16 tf_n_layer=2 train_batch_size=16
train_timesteps=12 num_warmup_steps=3 summary_interval=1 eval_interval=4 gen_interval=4
eval_episodes=6 eval_copies=2 ckpt_interval=5"""
)


@pytest.fixture(scope="module")
def histories(tmp_path_factory):
    path = tmp_path_factory.mktemp("histories") / "histories.npz"
    windows.collect(read(SMALL), path)
    return path


def run_small(folder, histories, *words):
    """Run the small settings in this rank, without a report and a picture."""
    run_.write_report = lambda *_, **__: ""
    evaluate.write = lambda folder, *_: None
    torch.set_num_threads(1)
    assert train.main([*SMALL, f"traj_file={histories}", f"output_dir={folder}", *words]) == 0


@pytest.fixture(scope="module")
def one(histories, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    ranks(1, run_small, str(folder), histories)
    return folder


def test_evaluate_reproduces_the_evaluation_of_the_run(one, capsys):
    """With the same rollouts on the same goals."""
    assert evaluate.main(["--ckpt_dir", str(one)]) == 0
    found = json.loads((one / "evaluation/summary.json").read_text())
    settings = found.pop("settings")
    assert (settings["eval_episodes"], settings["eval_copies"], settings["seed"]) == (6, 2, 0)
    assert found == json.loads((one / "summary.json").read_text())["test"]
    output, returns = capsys.readouterr().out, np.load(one / "evaluation/eval_result.npy")
    assert returns.shape == (3, 6)  # of 25 goals a tenth is held out
    assert f"overall mean {returns.mean():.2f}" in output
    assert found["return_last10"] == pytest.approx(returns.mean())
    assert {"control_wiped", "control_zero_reward", "fraction_of_optimum"} < set(found)
    assert (one / "evaluation/returns.png").stat().st_size > 10000
    with pytest.raises(UserError, match="--ckpt_dir: .* is not a finished run of src/ad/train.py"):
        evaluate.main(["--ckpt_dir=tests"])


def test_a_run_whose_package_is_gone_is_a_finished_run(one, tmp_path, monkeypatch):
    shutil.copytree(one, tmp_path / "lake")
    settings = json.loads((one / "config.json").read_text()) | {"env": "FrozenLake-v1"}
    (tmp_path / "lake/config.json").write_text(json.dumps(settings))
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UserError, match="--env: .*pip install gymnasium"):
        evaluate.main([f"--ckpt_dir={tmp_path}/lake"])


LEARNS = runs.words(
    """grid_size=5 horizon=10 n_stream=20 total_source_timesteps=4000 train_n_stream=20
train_source_timesteps=200 n_transit=100 train_batch_size=32 train_timesteps=260 num_warmup_steps=20
gen_interval=0 eval_interval=0 eval_episodes=20 summary_interval=20"""
)


def interrupted(folder, histories):
    """Interrupt the evaluation after the last step -> the steps of the checkpoints."""

    def evaluate_agent(*_, **__):
        raise KeyboardInterrupt

    evaluate.evaluate_agent = evaluate_agent
    with pytest.raises(KeyboardInterrupt):
        run_small(folder, histories, "gen_interval=0")
    return sorted(path.name for path in Path(folder).glob("checkpoints/step-*"))


def test_the_last_steps_are_saved_before_they_are_evaluated(histories, tmp_path):
    """The evaluation cannot stop, and a launcher kills what does not end in time."""
    [saved] = ranks(1, interrupted, str(tmp_path / "run"), histories)
    assert saved == ["step-00000010", "step-00000012"]


def test_it_learns_in_context_on_held_out_goals(tmp_path):
    """On a small grid, in seconds; the real thresholds are below, under `show`."""
    folder = tmp_path / "run"
    assert train.main([*LEARNS, f"traj_file={tmp_path / 'x.npz'}", f"output_dir={folder}"]) == 0
    found = json.loads((folder / "summary.json").read_text())["test"]
    returns = np.load(folder / "eval_result.npy")
    print(found)
    assert runs.lines(folder, "train")[-1]["loss"] < 1.0
    assert returns[:, -5:].mean() > 2 * returns[:, 0].mean()
    for control in ("control_wiped", "control_zero_reward"):
        assert found[control] < 0.6 * found["fraction_of_optimum"]


@pytest.mark.show
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_demo_learns_in_context(seed, tmp_path):
    """With two processes: the project's thresholds, for three splits into training and held-out."""
    folder = tmp_path / "run"
    command = [f"{BIN}/torchrun", "--standalone", "--nproc_per_node=2", SCRIPT]
    command += [f"output_dir={folder}", f"env_split_seed={seed}", "train_batch_size=12"]
    done = programs.process([*command, f"traj_file={tmp_path / 'x.npz'}"])
    summary = json.loads((folder / "summary.json").read_text())
    found = summary["test"]
    print(seed, summary["seconds"], found, done.stdout[-300:])
    assert found["fraction_of_optimum"] >= 0.9
    assert found["control_wiped"] <= 0.15
    assert found["control_zero_reward"] <= 0.15
    assert found["area"] > found["shared_area"] > found["single_area"]
    spent = found["shared_streams"] * found["shared_episodes_to_80"]
    assert spent == pytest.approx(520, abs=80) and found["episodes_to_80"] < 0.05 * spent
    assert summary["seconds"] < 240


@pytest.mark.show
@pytest.mark.parametrize("name", ["darkroom_permuted", "key_to_door"])
def test_other_tasks_are_learned_in_context(name, tmp_path):
    """With the project's settings and one process, in two minutes and eight minutes."""
    folder = tmp_path / "run"
    command = [sys.executable, SCRIPT, "--config", f"{ROOT}/config/model/{name}.yaml"]
    command += [f"output_dir={folder}", f"traj_file={tmp_path / 'x.npz'}"]
    programs.process(command, timeout=2000)
    found = json.loads((folder / "summary.json").read_text())["test"]
    print(name, found)
    assert found["fraction_of_optimum"] >= 0.85  # measured: 0.89 and 0.95
    hidden = "control_zero_action" if name == "darkroom_permuted" else "control_zero_reward"
    assert found[hidden] <= 0.4


BANNER = """============================================================
Multi-GPU Training Configuration
============================================================
Number of processes: {size}
Distributed type: DistributedType.{kind}
Mixed precision: {precision}
Gradient accumulation steps: {turns}
Main process device: cpu
============================================================
"""
ACCELERATE = [f"{BIN}/accelerate", "launch"]
TORCHRUN = [f"{BIN}/torchrun", "--standalone", "--nproc_per_node=2"]
CONFIGURED = [*ACCELERATE, "--config_file", str(ROOT / "config/accelerate/cpu.yaml")]


@pytest.mark.parametrize(
    ("launcher", "size", "name", "words"),
    [
        pytest.param(
            [*ACCELERATE, "--num_processes", "1", "--num_machines", "1"],
            *(1, "python", []),
            marks=pytest.mark.show,
        ),
        ([*CONFIGURED, "--main_process_port", "0"], 2, "accelerate", ["train_batch_size=8"]),
        pytest.param(
            TORCHRUN,
            *(2, "torchrun", ["train_batch_size=4", "gradient_accumulation_steps=2"]),
            marks=pytest.mark.show,
        ),
    ],
    ids=["accelerate, one", "accelerate, two", "torchrun, two"],
)
def test_each_launcher_trains_alike(launcher, size, name, words, one, histories, tmp_path):
    """From the folder of the script, as in the guide; the losses are those of one process."""
    place = f"traj_file={histories}", f"output_dir={tmp_path / 'run'}"
    words += ["train_timesteps=3", "gen_interval=0"]
    done = programs.process([*launcher, "train.py", *SMALL, *place, *words], cwd=ROOT / "src/ad")
    kind, turns = "MULTI_CPU" if size > 1 else "NO", 2 if "torchrun" in name else 1
    banner = BANNER.format(size=size, kind=kind, precision="no", turns=turns)
    assert done.stdout.count(banner) == 1  # of the main process alone
    about = json.loads((tmp_path / "run/environment.json").read_text())
    assert (about["launcher"], about["world_size"]) == (name, size)
    found = [line["loss"] for line in runs.lines(tmp_path / "run", "train")]
    expected = [line["loss"] for line in runs.lines(one, "train")][:1]
    assert found[:1] == pytest.approx(expected, abs=1e-5)
    assert {p.name for p in (tmp_path / "run/checkpoints").iterdir()} == {"step-00000003"}


FP16 = "error: --mixed_precision: fp16 is not supported on a CPU; use no"


def test_fp16_on_a_cpu_is_one_line(histories, tmp_path):
    words = [f"traj_file={histories}", f"output_dir={tmp_path / 'run'}", "mixed_precision=fp16"]
    outcome = run_ranks(1, train.main, [*SMALL, *words])
    assert (outcome.codes, outcome.logs) == ([2], [FP16 + "\n"])
    assert not (tmp_path / "run").exists()


@pytest.mark.show
def test_the_launchers_precision_overrides_the_settings(histories, tmp_path):
    """On a CPU, fp16 is an error of one line, wherever it comes from; bf16 trains."""
    place = f"traj_file={histories}", f"output_dir={tmp_path / 'run'}"
    words = [*SMALL, *place, "train_timesteps=2"]
    command = [*ACCELERATE, "--num_processes", "1", "--num_machines", "1", "--mixed_precision"]
    done = programs.process([*command, "fp16", SCRIPT, *words, "mixed_precision=no"], code=1)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line == FP16
    assert not (tmp_path / "run").exists()
    done = programs.process([*command, "bf16", SCRIPT, *words])
    assert "Mixed precision: bf16" in done.stdout


def test_features_of_accelerate_that_are_not_supported_are_errors(monkeypatch):
    """With the variables that accelerate's launcher sets; those of FSDP come from a real start."""
    flags = ["--use_fsdp", "--num_processes", "1", "--num_machines", "1"]
    done = programs.process([*ACCELERATE, *flags, SCRIPT, "--check"], code=1)
    expected = "error: accelerate: use_fsdp is not supported; use no in accelerate config"
    assert expected in done.stderr.splitlines()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(UserError, match="^accelerate: dynamo_backend is not supported; use no in"):
        read([])
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    for name in ("USE_DEEPSPEED", "USE_MEGATRON_LM", "USE_PARALLELISM_CONFIG", "IN_TPU_POD"):
        monkeypatch.setenv(f"ACCELERATE_{name}", "true")
        with pytest.raises(UserError, match="^accelerate: .* is not supported; use no in"):
            read([])
        monkeypatch.setenv(f"ACCELERATE_{name}", "false")
    assert read([]).backend == "auto"
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert read([]).backend == "gloo"


@pytest.mark.parametrize("size", [pytest.param("1", marks=pytest.mark.show), "2"])
def test_a_note_is_printed_if_accelerate_starts_one_process_instead_of_two(size, tmp_path):
    """Without --multi_gpu and several GPUs, accelerate starts one process in any case."""
    flags = ["--num_processes", size, "--num_machines", "1", "--main_process_port", "0"]
    words = [SCRIPT, "--check", f"traj_file={tmp_path / 'x.npz'}"]
    done = programs.process([*ACCELERATE, *flags, *words])
    note = "accelerate: only one process; add --multi_gpu to start several, on CPUs too"
    assert (note in done.stdout.splitlines()) == (size == "2")


def test_the_yaml_files_have_the_settings_of_the_guide():
    plain = read(["--config", "config/model/ad_dr.yaml"])
    assert (plain.tf_n_embd, plain.tf_n_layer, plain.n_transit, plain.lr) == (64, 4, 240, 3e-4)
    assert (plain.train_batch_size, plain.test_batch_size) == (512, 2048)
    both = ["--config", "config/model/ad_dr_compressed.yaml"]
    compressed = read([*both, "tf_n_layer=2", "--lr", "1e-3"])
    assert (compressed.use_compressed_context, compressed.compress_interval) == (True, 80)
    assert (compressed.tf_n_embd, compressed.horizon, compressed.n_stream) == (128, 20, 100)
    assert (compressed.tf_n_layer, compressed.lr) == (2, 1e-3)  # the last ones count
    for name in ("darkroom_permuted", "key_to_door"):
        settings = read(["--config", f"config/model/{name}.yaml"])
        assert (settings.env, settings.horizon) == (name, 50)
    assert Config().train_timesteps == 1500


def test_accelerate_reads_the_configurations():
    from accelerate.commands.config.config_args import load_config_from_file

    for name, size in {"cpu": (1, 2), "one_node": (1, 4), "two_nodes": (2, 8)}.items():
        answers = load_config_from_file(str(ROOT / f"config/accelerate/{name}.yaml"))
        # otherwise it starts one process
        assert answers.distributed_type == "MULTI_GPU" and not answers.use_cpu
        assert (answers.num_machines, answers.num_processes) == size


WRONG = {
    "lr=0": "--lr: 0.0 is out of range (expected > 0)",
    "grid_size=17": "--grid_size: 17 is out of range (expected >= 2 and <= 16)",
    "horizon=7": "--total_source_timesteps: 19200 is out of range (expected a multiple of n_str",
    "tf_n_head=5": "--tf_n_embd: 32 is out of range (expected an even multiple of tf_n_head)",
    "train_env_ratio=0.999": "--train_env_ratio: 0.999 is out of range (expected some tasks on",
    "use_compressed_context=true compress_interval=30": "--compress_interval: 30 is out of range",
    "train_source_timesteps=200": "--train_source_timesteps: 200 is out of range (expected >= the",
    "--config=a.yaml lr=1": "a.yaml:2: n_trasit is not a setting; did you mean n_transit?",
    "--config=b.yaml": "b.yaml:1: lr: 0 is out of range",
    "--config=b.yaml num_workers=4 lr=-1": "--lr: -1.0 is out of range",
}


def test_a_mistake_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("lr: 1e-3\nn_trasit: 80\n")
    Path("b.yaml").write_text("lr: 0\n")
    for words, message in WRONG.items():
        with pytest.raises(UserError, match="^" + re.escape(message)):
            read(words.split())


def test_episodes_that_are_too_short_for_any_reward_are_a_warning(capsys):
    for words, is_warned in (("horizon=1", True), ("", False)):
        read(f"env=darkroom_permuted {words}".split())
        assert ("no held-out task has a reward" in capsys.readouterr().out) == is_warned


def test_a_setting_without_an_effect_is_no_error_but_a_warning(capsys):
    """A compressed context is longer than an episode, whatever n_transit is."""
    words = "use_compressed_context=true horizon=300 compress_interval=300 n_stream=2"
    words += " train_n_stream=2 total_source_timesteps=1200 train_source_timesteps=600"
    assert read(words.split()).window == 600
    assert "warning" not in capsys.readouterr().out
    pytest.importorskip("gymnasium")
    frozen = read(["env=FrozenLake-v1", "grid_size=12", "train_timesteps=15"])
    assert "grid_size" not in frozen.source_settings()
    assert capsys.readouterr().out.splitlines() == [
        "warning: --grid_size has no effect: FrozenLake-v1 has a size of its own",
        "warning: --num_warmup_steps: more than the steps; lr ends at 20% of its peak",
    ]


def test_histories_are_not_collected_for_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    place = [f"traj_file={tmp_path / 'x.npz'}", f"output_dir={tmp_path / 'file/run'}"]
    with pytest.raises(UserError, match="^run folder: .*file is not a folder that you can write"):
        train.main([*SMALL, *place])
    assert not (tmp_path / "x.npz").exists()


def test_histories_of_other_settings_are_an_error(histories, tmp_path):
    place = [f"traj_file={histories}", f"output_dir={tmp_path / 'run'}"]
    with pytest.raises(UserError, match=r"was collected with alg_seed 42 \(expected 7\); use"):
        train.main([*SMALL, *place, "alg_seed=7"])
    assert not (tmp_path / "run").exists()


def test_check_trains_nothing(tmp_path, capsys):
    place = [f"traj_file={tmp_path / 'x.npz'}", f"output_dir={tmp_path / 'run'}"]
    assert train.main([*SMALL, *place, "--check"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"histories: {tmp_path / 'x.npz'}, to be collected",
        f"check passed: 12 steps, run folder {tmp_path / 'run'}",
    ]
    assert list(tmp_path.iterdir()) == []
