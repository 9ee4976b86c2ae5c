"""Faults for runs of src/main_distributed.py: kills, signals, full disks, NaN, hangs."""

import hashlib
import importlib
import json
import os
import resource
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import torch

import main_distributed
import runs
from ddp_utils import checkpoints, distributed, run
from ddp_utils.policy import Policy
from lm import logps
from lm.sharding import deepspeed_engine
from ranks import run_ranks

# twelve steps with a checkpoint after 5 and 10, a validation after 4, 8 and 12
STEPS = runs.words("--max_steps 12 --max_rows 40 --batch_size 8 --save_every 5 --eval_every 4")
STEPS += [*runs.QUIET, "--val_data", runs.PAIRS]
MODES = {"full": runs.FULL, "lora": [*runs.LORA, "--lora_dropout", "0.1"]}


def start(world_size, folder, *flags, fault=None, env=None):
    """Run a script in its own processes -> Outcome. fault: (function below, *arguments)."""
    return run_ranks(world_size, _run, str(folder), flags, fault, env=env)


def _run(folder, flags, fault):
    runs.hurry()
    if fault:
        fault[0](*fault[1:])
    code = main_distributed.main([*STEPS, *flags, "--result_dir", folder])
    assert code == 0


def finished(outcome):
    """Return the outcome, after a check that all ranks ended with 0."""
    assert set(outcome.codes) == {0}, outcome.logs
    return outcome


def digest(folder):
    """sha256 of the final weights of a run."""
    (weights,) = Path(folder).glob("model/*.safetensors")
    return hashlib.sha256(weights.read_bytes()).hexdigest()


def numbers(folder):
    """The lines of metrics.jsonl without values that depend on the time."""
    clock = {"seconds", "tokens_per_second", "peak_memory_mb", "mfu"}
    return [{k: v for k, v in line.items() if k not in clock} for line in runs.lines(folder)]


def is_equal(folder, expected):
    """Check that weights and all lines of the metrics are bit-identical."""
    assert digest(folder) == digest(expected)
    assert numbers(folder) == numbers(expected)
    return True


def summary(folder):
    return json.loads((Path(folder) / "summary.json").read_text())


def steps(folder):
    """The steps of the checkpoints, oldest first."""
    return sorted(int(path.name[5:]) for path in Path(folder, "checkpoints").glob("step-*"))


# --- faults --------------------------------------------------------------------------------------


def stop_in_evaluation(number):
    """The signal of a time limit comes after `number` micro-batches; 0: never. Prints each."""
    left, evaluation = [number], run.Run.evaluation

    def counted(self, *arguments):
        for micro_batch in evaluation(self, *arguments):
            yield micro_batch
            print("computed")
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGUSR1)

    run.Run.evaluation = counted


def _is_rank(rank):
    return rank in (None, int(os.environ["RANK"]))


def at_backward(rank, step, action):
    """action(loss) -> loss in the backward of a step, counted from 0 in this life."""
    turn, is_last = [0], [False]
    for policy in (Policy, deepspeed_engine.ZeroPolicy):
        spoil(policy, rank, step, action, turn, is_last)


def spoil(policy, rank, step, action, turn, is_last):
    sync, backward = policy.sync_gradients, policy.backward

    def watch(self, last):
        is_last[0] = last
        sync(self, last)

    def faulty(self, loss):
        if turn[0] == step and _is_rank(rank):
            loss = action(loss)
        turn[0] += is_last[0]
        backward(self, loss)

    policy.sync_gradients, policy.backward = watch, faulty


def kill_in_backward(rank, step):
    at_backward(rank, step, lambda loss: die())


def signal_in_backward(rank, step, number):
    at_backward(rank, step, lambda loss: (os.kill(os.getpid(), number), loss)[1])


def spoil_in_backward(rank, step, value):
    at_backward(rank, step, lambda loss: loss * value)


def spoil_loss(_rank, step, value):
    """The log-prob of the first pair of a step's global batch is NaN or infinite in that step."""
    train_step = main_distributed.train_step
    collate, forward = logps.Scorer.collate, logps.Scorer.forward
    bad, collated = [], []

    def watch(policy, number, rows, data, *rest):
        bad[:] = [data["train"][rows[0]].location] if number == step else []
        return train_step(policy, number, rows, data, *rest)

    def remember(self, pairs, device):
        collated[:] = [pair.location for pair in pairs]
        return collate(self, pairs, device)

    def faulty(self, batch):
        chosen, rejected = forward(self, batch)
        for number, location in enumerate(collated):
            if location in bad:
                chosen = torch.cat([chosen[:number], chosen[:1] * 0 + value, chosen[number + 1 :]])
        return chosen, rejected

    main_distributed.train_step = watch
    logps.Scorer.collate, logps.Scorer.forward = remember, faulty


def kill_while_saving(call, number):
    """SIGKILL of the writer at the number-th call of a function, such as `os.rename`."""
    before_call("checkpoints." + call, number, die)


def signal_before(name, number, which, rank=None):
    """A signal to this process right before the number-th call of a function."""
    if _is_rank(rank):
        before_call(name, number, lambda: os.kill(os.getpid(), which))


def before_call(name, number, action):
    path, call = name.rsplit(".", 1)
    owner = main_distributed
    for part in path.split(".") if path != "main_distributed" else ():
        owner = getattr(owner, part, None) or importlib.import_module(f"ddp_utils.{part}")
    original, left = getattr(owner, call), [number]

    def faulty(*arguments, **options):
        left[0] -= 1
        if left[0] == 0:
            action()
        return original(*arguments, **options)

    setattr(owner, call, faulty)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang_in_backward(rank, step, seconds):
    at_backward(rank, step, lambda loss: (time.sleep(seconds), loss)[1])


def leave(rank, step):
    at_backward(rank, step, lambda loss: os._exit(0))


def fail_in_backward(rank, step):
    def fail(loss):
        raise ZeroDivisionError("the weights fell off")

    at_backward(rank, step, fail)


def run_out_of_time(rank, step):
    """As if an hour had passed."""

    def later(loss):
        distributed._started -= 3600
        return loss

    at_backward(rank, step, later)


def save_long(seconds):
    """As if the job had run for 2000 s, and each checkpoint took so long, or a little longer."""
    real, late, write = time.perf_counter, [0.0], checkpoints.write
    run.time = SimpleNamespace(perf_counter=lambda: real() + late[0], strftime=time.strftime)
    distributed._started -= 2000

    def slow(*arguments):
        write(*arguments)
        late[0] += seconds + late[0] / 100

    checkpoints.write = slow


def save_first(folder):
    """As if another run saved its model to this folder right before this run does."""

    def save():
        folder.mkdir()
        (folder / "model.safetensors").touch()

    before_call("run.Run.save_model", 1, save)


def kill_before_saving_the_model():
    before_call("models.save_policy", 1, die)


def kill_after_saving_the_model():
    before_call("run.Run._close", 1, die)


def limit_files(number, size):
    """From the number-th checkpoint on no file may be larger: a full disk that needs no root."""

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    before_call("checkpoints.save_file", number, limit)


if __name__ == "__main__":  # under a launcher: FAULT="kill_in_backward 1 6", in the first life only
    fault = os.environ.get("FAULT")
    if fault and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        name, *numbers = fault.split()
        globals()[name](*(int(word) if word.isdecimal() else float(word) for word in numbers))
    torch.set_num_threads(1)
    distributed.run(main_distributed.main)
