"""The run folder: settings, environment, metrics, checkpoints, and how the run ended.

To resume an unfinished run, run the same command again. Rank 0 alone writes and prints, except that
each rank writes its own part of a sharded checkpoint.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ddp_utils import (
    NonFiniteError,
    Stop,
    UserError,
    checkpoints,
    cli,
    data,
    distributed,
    exit_code,
    metrics,
    out_of_memory,
    save_seconds,
)
from ddp_utils.checkpoints import RunSpec
from ddp_utils.distributed import Table, World
from ddp_utils.policy import Policy
from ddp_utils.sampler import Plan
from ddp_utils.terminal import Bar, Phase, columns, row, wrapped
from ddp_utils.tools import changes
from ddp_utils.tools.changes import SRC

REFERENCE = "reference_logps.safetensors"
EVALUATION = "parts/evaluation.safetensors"  # sums of one that was stopped
OWN = "own/"  # what the names of Run.keep() begin with in a checkpoint
SAVE_MINUTES = 15  # if save_every is 0, at least so long between two checkpoints of an epoch
SAVE_FRACTION = 0.05  # of the time is spent on saving, at most, unless save_every is set
TRIED_ON = ("cuda", "xpu")  # devices that report that they are out of memory
LINES = 30  # steps that a run prints into a pipe by default
PART = 2048  # rows that are scored between two times that their log-probs are stored
STATUS = {0: "finished", 85: "preempted"}  # by exit status; any other is "failed"
Values = dict[str, float]  # metric -> value
T = TypeVar("T")
Parts = Sequence[Sequence[int]]  # lists of rows of a table


class RunConfig(Protocol):
    """The settings that a Run reads."""

    restart: bool
    deterministic: bool
    save_every: int  # steps; 0: every 15 minutes
    keep_checkpoints: int
    stop_after_minutes: float
    report_to: Literal["tensorboard", "wandb", "none"]


# --- the environment -----------------------------------------------------------------------------


def environment(config: Any, world: World) -> dict[str, Any]:
    """Return what is needed to repeat a run."""
    versions = {name: metadata.version(name) for name in ("transformers", "peft")}
    return {
        "command": typed_command(),
        "directory": os.getcwd(),
        "launcher": world.launcher,
        **checkpoints.start_facts(),
        "world_size": world.world_size,
        "backend": world.backend,
        "device": metrics.device_name(world.device),
        "git_commit": changes.git("rev-parse", "HEAD"),
        "git_dirty": bool(changes.git("status", "--porcelain", "--", "src")),  # also a new file
        "versions": {"torch": torch.__version__, **versions},
        "code": code_digests(),
        "changes": changes.of_script(Path(sys.argv[0]).resolve()),
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "pid": os.getpid(),
        "start": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "defaults": defaults_of_set(config),
    }


def defaults_of_set(config: Any) -> dict[str, Any]:
    """Return the default of each setting that the user has set, for the report.

    These are all flags, the values of a YAML file that differ from the default, and defaults that
    were edited in the code. What a script itself has filled in, such as demo data, is not set.
    """
    values, defaults = vars(config), {}
    places = values.get("places", {})  # as cli.parse_with_file() has left them
    for field in dataclasses.fields(config):
        place = places.get(field.name, "")
        if place.startswith("--") or (place and values[field.name] != field.default):
            defaults[field.name] = field.default
    return defaults | changes.edited_defaults(type(config))


def typed_command() -> str:
    """Return the command that the user has typed, with its launcher where that is known."""
    command = os.environ.get("DDP_COMMAND")  # of a run_*.sh
    if command:
        return command
    words: list[str] = []
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().strip("\0").split("\0")
    for number, word in enumerate(words):
        if Path(word).name in ("torchrun", "accelerate"):
            return shlex.join([Path(word).name, *words[number + 1 :]])
    return shlex.join(sys.orig_argv)


def code_digests() -> dict[str, str]:
    """Return a digest of each file of code that this run may import, below src, and of its script.

    All files of its packages count, since some are imported only when they are needed, as by the
    first start alone, which makes the token ids.
    """
    loaded = [str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]]
    files = {Path(file) for file in loaded if file.startswith(f"{SRC}/")}
    for package in {"ddp_utils", *(file.relative_to(SRC).parts[0] for file in files)}:
        files.update(SRC.glob(f"{package}/**/*.py"))
    digests = {str(path.relative_to(SRC)): data.sha256(path)[:16] for path in sorted(files)}
    script = Path(sys.argv[0]).resolve()
    if script.suffix == ".py" and script not in files:
        digests[script.name] = data.sha256(script)[:16]
    return digests


def without_users(text: str) -> str:
    """Return the text without the user and password in URLs."""
    return re.sub(r"(:/{1,2})[^/?#\s'\"]+@", r"\1", text)


def check(spec: RunSpec, config: RunConfig, world: World) -> int:
    """Print, on rank 0, what a run would do; nothing is written. Return 0."""
    facts = environment(config, world)
    state = checkpoints.inspect(spec, settings_of(config), facts, config.restart)
    if world.is_main:
        passed = f"check passed: {spec.steps} steps, run folder {spec.folder}"
        print(*spec.lines, *state.lines, passed, sep="\n")
    return 0


def settings_of(config: Any) -> dict[str, Any]:
    """Return the settings as they are in config.json."""
    return json.loads(without_users(json.dumps(dataclasses.asdict(config))))


# --- the run -------------------------------------------------------------------------------------


class Run:
    """One run in its folder, new or resumed. A context manager: leaving it writes summary.json.

    Methods are called on all ranks, unless they say otherwise.

    loggers: besides that of config.report_to, objects with log(split, step, values) and close(),
    which rank 0 calls.
    """

    def __init__(self, spec: RunSpec, config: RunConfig, world: World, loggers: Sequence[Any] = ()):
        self.spec, self.config, self.world = spec, config, world
        self.loggers = [*loggers]
        self.folder, self.steps = checkpoints.target_of(spec.folder), spec.steps
        self.checkpoints = self.folder / "checkpoints"
        self.results: dict[str, Any] = {}  # split -> the numbers of its last evaluation
        self.warnings = [*cli.noted]  # printed by this start of the run, or by earlier ones
        self.validated = -1  # steps before the last validation
        self.best_validation: Values = {}  # with save_best
        self.training: Any = None  # policy, optimizer and schedule, once they exist
        self.kept: dict[str, tuple[dict, str]] = {}  # name in a checkpoint -> dict and key; keep()
        self.must_stop = self.must_save = False  # as all ranks have agreed in the last step
        self.is_evaluating = False  # see evaluated()
        self.bar = Bar(world.is_main)
        self.start = self.saved_at = time.perf_counter()  # start: minus seconds of earlier starts
        self.save_seconds = 0.0  # of the last checkpoint
        self.peak_memory_mb = 0.0  # of try_largest_steps(), on rank 0
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA requires this
            torch.use_deterministic_algorithms(True)
        self.changes = ""  # of the script, to the project's
        if world.world_size > 1:
            self._check_alike()
        self.done = distributed.on_main(world, self._open)  # steps of earlier starts
        if spec.shard_layout:
            distributed.on_each(world, lambda: checkpoints.check_seen(self.folder, world.rank))
        elif not world.is_one_node:
            is_hidden = torch.tensor(float(not self.folder.exists()), device=world.device)
            if distributed.all_sum(is_hidden, world):
                hint = "a stopped run needs a folder that all nodes can read"
                self.say(f"warning: not all nodes see {self.folder}: {hint} to be resumed")
        self.step = self.saved = self.done
        self.interrupted: dict[str, Tensor] = {}  # the tables of EVALUATION, until they are used
        distributed.stop_requested()  # from here on, a signal waits until the run can save

    def _check_alike(self) -> None:
        """Raise UserError if a rank has other settings, data or code than rank 0."""
        settings = settings_of(self.config).items()
        # a path may be another one on each node; the inputs have digests of what it leads to
        own: dict[str, Any] = {name: value for name, value in settings if "/" not in str(value)}
        own |= self.spec.inputs | {"steps": self.spec.steps} | code_digests()
        main = distributed.on_main(self.world, lambda: own)
        rank = self.world.rank
        distributed.on_each(self.world, lambda: checkpoints.check_alike(main, own, rank))

    def _open(self) -> int:
        """Create, resume or replace the folder, on rank 0; raise Stop if nothing is left to do."""
        from ddp_utils import loggers

        settings = settings_of(self.config)
        facts = environment(self.config, self.world)
        state = checkpoints.inspect(self.spec, settings, facts, self.config.restart)
        if state.action == "finished":
            raise Stop(state.lines[0], 0)
        loggers.check(self.config.report_to)
        moved = None
        if state.action == "move aside":
            held = checkpoints.lock(self.folder)
            moved = checkpoints.move_aside(self.folder)
            held.release()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = checkpoints.lock(self.folder)
        self.step = state.step
        try:
            own = loggers.make(self.config.report_to, self.folder, self.step, settings)
        except UserError:  # the new run has not begun, and the earlier one stays
            if moved:
                shutil.rmtree(self.folder)
                moved.rename(self.folder)
            raise
        self.loggers = [*own, *self.loggers]
        if moved:
            self.say(f"{self.folder} has an earlier run: moved to {moved}")
        for line in state.lines:
            self.say(line)
        self.changes = facts["changes"]
        self.write_json("environment.json", facts | {"inputs": self.spec.inputs})
        self.write_summary("running", 0)
        self.write_json("config.json", settings)  # last: a folder with this file has a run
        self.metrics = open(self.folder / "metrics.jsonl", "ab", buffering=0)  # noqa: SIM115
        size = min(state.metrics_bytes, self.metrics.seek(0, os.SEEK_END))
        self.metrics.truncate(size)  # the steps after the checkpoint are done again
        self.bar.begin("", self.steps, self.step, time.perf_counter() - self.start)
        return self.step

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if self.world.is_main:
                self._close(error)
        except OSError:  # on a full disk; the first error counts
            if error is None:
                raise

    def _close(self, error: BaseException | None) -> None:
        code = exit_code(error)
        self.bar.close()
        problem = metrics.worse(self.results.get("before", {}), self.results.get("val", {}))
        if problem and error is None:  # printed with the results
            fix = "use a smaller learning rate, or fewer epochs"
            self.warnings.append(f"warning: {problem}; {fix}")
        self.write_summary(STATUS.get(code, "failed"), code)
        for logger in self.loggers:
            logger.close()
        self.metrics.close()
        problem = write_report(self.folder, error is None, self.bar.say)
        self.lock.release()
        if problem:
            self.say(f"warning: no report.html: {problem}")
        if error is not None and self.saved and code != 85:
            self.say(f"run the same command to resume after step {self.saved}")

    # --- messages and files ----------------------------------------------------------------------

    def say(self, line: str) -> None:
        """Print one line on rank 0; a warning is kept for summary.json, the report and the card."""
        if line.startswith("warning: "):
            self.warnings.append(line)
        if self.world.is_main:
            self.bar.say(wrapped(line))

    def warn(self, line: str | None) -> None:
        """Print and keep a warning, once per run; None is none."""
        if line and line not in self.warnings:
            self.say(line)

    def describe(self, **rows: str) -> None:
        """Print what the run trains, with what, and on which data; write data_report.json."""
        ranks = f"{self.world.world_size} x {self.world.device.type}"
        if self.changes:
            rows["changed"] = self.changes
        for name, text in {"ranks": ranks, **rows, "folder": f"{self.folder}/"}.items():
            self.say(row(name, without_users(text)))
        for text in map(without_users, self.spec.lines):
            self.say(text if text.startswith("warning: ") else row("data", text))
        self.write_json("data_report.json", self.spec.report)

    def _note_best(self, step: int, values: Values) -> None:
        """Note, with save_best, a validation with the lowest loss so far."""
        loss = values.get("loss", values.get("kl", math.inf))
        lowest = self.results.get("best", {"loss": math.inf})["loss"]
        if self.spec.save_best and step and loss < lowest:
            self.results["best"] = {"loss": loss, "step": step}
            self.best_validation = dict(values)

    def log(self, step: int, values: Values, split: str = "train", echo: bool = True) -> None:
        """Append one line to metrics.jsonl in full precision.

        echo: print it as well; of the lines of training, one in spec.log_every is printed.
        """
        if split != "test":
            self.step = step
        if split == "val":
            self.validated = step
            self._note_best(step, values)
        if not self.world.is_main:
            return
        line = {"split": split, "step": step, **finite(values)}
        self.metrics.write((json.dumps(line) + "\n").encode())
        for logger in self.loggers:
            logger.log(split, step, values)
        # before the first update, policy and reference are equal, unless it is another model
        is_tie = step == 1 and abs(values.get("rewards/margins", 0.0)) < metrics.EQUAL
        texts = columns(values, ["rewards/accuracies"] if is_tie and split == "train" else [])
        if split == "train":
            self.bar.reach(step, "  ".join(texts[:3]))
            every = self.spec.log_every or math.ceil(self.steps / LINES)
            is_first = step == 1 and not self.spec.log_every
            echo = echo and not self.bar.is_shown and (step % every == 0 or is_first)
        if echo:
            title = f"step {step:5d}" if split == "train" else f"{split:>10}"
            self.say(" | ".join([title, *texts]))

    def validate(self, step: int, is_due: bool, evaluate: Callable[[], Values]) -> None:
        """Log evaluate() if it is due and no earlier start of the run has logged it.

        The results before the first step are `before`, unless there is no other one.
        """
        if is_due and self.validated < step:
            values = self.evaluated(evaluate)
            self.results["before" if step == 0 < self.steps else "val"] = values
            self.log(step, values, "val")
            self.write_summary("running", 0)  # for the report of a run that is killed

    def evaluated(self, evaluate: Callable[[], Any]) -> Any:
        """Return evaluate(); if the run is stopped meanwhile, save after evaluate() has ended.

        A script may evaluate other weights than it trains: Policy.swapped() exchanges them back
        before the checkpoint is written.
        """
        self.is_evaluating = True
        try:
            return evaluate()
        except Stop:
            self.save_if_due(False)
            raise
        finally:
            self.is_evaluating = False

    def write_json(self, name: str, content: Any) -> None:
        """Write plain data to a file of the run folder, on rank 0."""
        if self.world.is_main:
            text = json.dumps(content, indent=2)
            if name != "examples.json":  # prompts and replies are not changed
                text = without_users(text)
            data.write_text(self.folder / name, text + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text to a file of the run folder, on rank 0, without control characters."""
        if self.world.is_main:
            data.write_text(self.folder / name, data.printable(text))

    def write_summary(self, status: str, code: int) -> None:
        """Write the status of the run and its results to summary.json, on rank 0."""
        facts: dict[str, Any] = {"status": status, "exit_code": code, "step": self.step}
        facts["world_size"] = self.world.world_size
        facts["seconds"] = round(time.perf_counter() - self.start, 3)
        if self.peak_memory_mb:
            facts["peak_memory_mb"] = self.peak_memory_mb
        facts |= {name: finite(values) for name, values in self.results.items()}
        warnings = dict.fromkeys(distributed.warnings + self.warnings)  # each of them once
        if warnings:
            facts["warnings"] = [*warnings]
        self.write_json("summary.json", facts)

    # --- checkpoints -----------------------------------------------------------------------------

    def keep(self, name: str, state: dict[str, Any]) -> None:
        """Make a dict of tensors or of numbers part of every checkpoint, for a changed script.

        Call this before restore(), which fills the dict from the checkpoint. Tensors are equal on
        all ranks, or have the shards of Policy.updated().
        """
        self.kept |= {f"{OWN}{name}/{key}": (state, key) for key in state}

    def restore(self, policy: Policy, optimizer: Any, schedule: Any) -> int:
        """Load the newest checkpoint, if there is one; return the number of steps done."""
        self.training = (policy, optimizer, schedule)
        path, world = self.folder / EVALUATION, self.world
        self.interrupted = from_main(
            load_tables(path, self._evaluation_facts()) if world.is_main else {}, world
        )
        if self.done:
            manifest = self._load(self.done)
            self.validated = manifest["validated"]
            self.best_validation = manifest["best_validation"]
            self.results = manifest["results"] | self.results
            self.warnings = self.results.pop("warnings", []) + self.warnings
            if self.spec.save_best is False:  # an earlier start may have had it
                self.results.pop("best", None)
            if self.validated == self.done:  # it may not have had it
                self._note_best(self.done, self.results.get("val", {}))
            now, before = str(policy.precision), manifest.get("precision")
            if before not in (None, now):
                line = f"the model computes in {now}, until step {self.done} in {before}"
                self.warn(f"warning: {line}")
            self.start -= manifest["seconds"]
            self.save_seconds = manifest.get("save_seconds", 0.0)
            self.write_summary("running", 0)
        # the time of scoring and sampling is none of the first step
        seconds = time.perf_counter() - self.start if self.done else 0.0
        self.bar.begin("", self.steps, self.done, seconds)
        return self.done

    def _load(self, step: int) -> dict[str, Any]:
        policy, optimizer, schedule = self.training
        path = checkpoints.path_of(self.checkpoints, step)
        rank = self.world.rank
        tensors, manifest = distributed.on_each(self.world, lambda: checkpoints.read(path, rank))
        digest = checkpoints.digest_of(manifest)
        if digest != distributed.on_main(self.world, lambda: digest):
            problem = f"rank {rank} has another checkpoint than rank 0"
            raise UserError(f"{path}: {problem}; use a folder that all nodes can read")
        own = manifest.get("own", {})
        for name in [name for name in tensors if name.startswith(OWN)]:
            own[name] = tensors.pop(name)
        if own.keys() != self.kept.keys():
            names = [", ".join(sorted(part)) or "nothing" for part in (own, self.kept)]
            problem = f"has {names[0]} (expected {names[1]}, as this script keeps it)"
            raise UserError(f"{path}: {problem}; use the old script, or --restart")
        layout = manifest["shard_layout"]
        self._fill_kept(own, layout)
        policy.load_state(optimizer, schedule, tensors, step, layout)
        return manifest

    def _fill_kept(self, own: dict[str, Any], layout: str) -> None:
        """Fill the dicts of keep() with what a checkpoint has of them."""
        policy = self.training[0]
        for name, (state, key) in self.kept.items():
            if isinstance(state[key], Tensor):
                state[key].copy_(policy.from_saved(own[name], state[key], layout))
            else:
                state[key] = own[name]

    def _saved_kept(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Return what a checkpoint contains of the dicts of keep(): tensors, and numbers."""
        tensors, numbers = {}, {}
        for name, (state, key) in self.kept.items():
            if isinstance(state[key], Tensor):
                value = self.training[0].to_saved(state[key], self.spec.shard_layout)
                if value is not None:  # on rank 0, or a shard
                    tensors[name] = value
            else:
                numbers[name] = state[key]
        return tensors, numbers

    @property
    def best(self) -> Any:
        """The step with the lowest validation loss, whose checkpoint is kept, with save_best."""
        return self.results.get("best", {}).get("step") if self.spec.save_best else None

    def restore_best(self) -> int:
        """Load the weights with the lowest validation loss, with save_best; return their step."""
        if self.best in (None, self.step):
            return self.step
        self.save()  # a run that is killed after this resumes from its last step
        path = checkpoints.path_of(self.checkpoints, self.best)
        problem = distributed.on_main(self.world, lambda: checkpoints.find_problem(path))
        if problem:
            raise UserError(f"{path}: {problem}; without --save_best the last weights are used")
        self._load(self.best)
        self.results["val"] = self.best_validation
        loss = self.results["best"]["loss"]
        self.say(f"save_best: back to step {self.best}, validation loss {loss:.4f}")
        return self.best

    def save(self) -> None:
        """Write a checkpoint of the steps done, and remove the oldest."""
        if self.saved == self.step or self.training is None:
            return
        policy, optimizer, _ = self.training
        kept, numbers = self._saved_kept()
        tensors = policy.state(optimizer, self.spec.shard_layout) | kept
        distributed.on_each(self.world, lambda: check_finite(tensors, self.step))
        facts: dict[str, Any] = {
            "shard_layout": self.spec.shard_layout,
            "precision": str(policy.precision),
            "own": numbers,
            "validated": self.validated,
            "results": self.results | {"warnings": distributed.warnings + self.warnings},
            "best_validation": self.best_validation,
            "seconds": time.perf_counter() - self.start,
            "save_seconds": self.save_seconds,  # of the checkpoint before this one
        }
        if self.world.is_main:
            os.fsync(self.metrics.fileno())  # before a checkpoint contains its size
            facts["metrics_bytes"] = self.metrics.seek(0, os.SEEK_END)
        start = time.perf_counter()
        checkpoints.write(self.checkpoints, self.step, tensors, facts, self.world)
        if self.world.is_main:
            keep = self.config.keep_checkpoints
            checkpoints.remove_old(self.checkpoints, keep, self.step, self.best)
        self.write_summary("running", 0)
        self.saved = self.step
        self.saved_at = time.perf_counter()
        self.save_seconds = self.saved_at - start
        limit, seconds = save_seconds(), self.save_seconds
        is_known = any("a checkpoint took" in line for line in self.warnings)
        if seconds > limit / 2 and not is_known:  # each save takes another number of seconds
            fix = f"export DDP_SAVE_SECONDS={4 * seconds:.0f}"
            fix += f", and write the job script with --lead {4 * seconds:.0f}"
            problem = f"a checkpoint took {seconds:.0f} s of the {limit} after a signal"
            self.warn(f"warning: {problem}; {fix}")

    def reduce(self, averages: metrics.Averages, grad_norm: Tensor) -> Values:
        """Return the means of a step and its gradient norm.

        The same reduction tells all ranks whether one was asked to stop, and whether the last
        checkpoint is too old.
        """
        age = time.perf_counter() - self.saved_at
        interval = max(60 * SAVE_MINUTES, self.save_seconds / SAVE_FRACTION)
        is_late = self.config.save_every == 0 and age > interval
        votes: Values = {"stop": self.is_asked(), "save": is_late and self.world.is_main}
        means = averages.reduce(votes, {"grad_norm": grad_norm})
        self.must_stop = means.pop("stop") > 0
        self.must_save = means.pop("save") > 0
        return means

    def save_if_due(self, is_due: bool) -> None:
        """After each step, save if it is due; save and raise Stop if a rank was asked to stop."""
        if is_due or self.must_save or self.must_stop or self.best == self.step:
            self.save()
        if self.must_stop:
            raise Stop(f"stopped after step {self.step}; run the same command to resume", 85)

    def try_largest_steps(
        self,
        policy: Policy,
        plan: Plan,
        sizes: np.ndarray,
        step: Callable[[int, list[int]], Any],
    ) -> None:
        """Before anything long, run the steps that need the most memory; no number changes.

        Otherwise a GPU may run out of memory after hours. On a CPU nothing is tried: there the
        system ends the process. sizes: the tokens of each row, [rows]; step(number, rows): forward
        and backward. Raises UserError if the memory does not suffice.
        """
        device = self.world.device
        if device.type not in TRIED_ON or self.done >= self.steps:
            return
        for number in plan.largest_steps(sizes):
            rows = plan.batch(number)
            size = f"step {number + 1}, {len(rows)} rows with {sizes[rows].sum():,} tokens"
            try:
                with policy.trial():
                    step(number, rows)
            except RuntimeError as error:
                reason = out_of_memory(error)
                if not reason:
                    raise
                fix = "use a smaller max_length or batch size, gradient checkpointing, or more GPUs"
                problem = f"the memory of rank {self.world.rank} does not suffice for {size}"
                raise UserError(f"{problem} ({reason}); {fix}") from error
            self.peak_memory_mb = round(metrics.peak_memory_mb(device), 1)
            self.say(row("memory", f"peak of {self.peak_memory_mb:,.0f} MiB in {size}"))

    def is_asked(self) -> bool:
        """Return whether this rank was asked to stop, or has no more time; others may not know."""
        return distributed.stop_requested(self.config.stop_after_minutes, self.save_seconds)

    def stop_if_requested(self) -> None:
        """Between two forwards, save and raise Stop if a rank was asked to stop."""
        self.must_stop = self.is_asked()
        if self.world.world_size > 1:  # one rank alone need not wait for its GPU
            vote = distributed.to_device([float(self.must_stop)], self.world.device)
            self.must_stop = distributed.all_sum(vote, self.world).item() > 0
        if self.must_stop and self.is_evaluating:
            raise Stop("", 85)  # to evaluated(), which saves
        if self.must_stop:
            self.save_if_due(False)

    def save_model(self, save: Callable[[Path], None]) -> None:
        """Call save(folder of the model), and note that what it now contains is of this run.

        Raises UserError if it has other files, for example the model of a run that was faster.
        """

        def check() -> None:
            if not checkpoints.has_claimed(self.spec):
                checkpoints.check_model_folder(self.spec)

        distributed.on_main(self.world, check)
        save(self.spec.model_folder or self.folder / "model")
        if self.spec.model_folder and self.world.is_main:
            self.write_json(checkpoints.CLAIM, checkpoints.claim_of(self.spec.model_folder))

    def phase(self, title: str, parts: int = 1, done: int = 0) -> Phase:
        """Return the progress of a part of the run, between whose forwards the run may stop."""
        return Phase(title, self.bar, self.stop_if_requested, self.is_asked, parts, done)

    def evaluation(
        self, split: str, micro_batches: Sequence[T], averages: metrics.Averages | Table
    ) -> Iterator[T]:
        """Yield the micro-batches of a split; the caller adds each to the averages or the table.

        If the run is stopped meanwhile, the sums of each rank are stored, and its next start
        continues with the next micro-batch and gets the same numbers. After a change of the code or
        of the number of processes, it evaluates all of them again.
        """
        world, path, done = self.world, self.folder / EVALUATION, 0
        stored = self.interrupted.pop(split, None)  # [ranks, names], of a table [ranks, N, K]
        if self.step != self.done:  # these sums are of the weights with which this start began
            stored = None
        if stored is not None:
            averages.sums, done = stored[world.rank], int(self.interrupted["done"])
        try:
            for micro_batch in self.phase(f"evaluating {split}").each(micro_batches[done:]):
                yield micro_batch
                done += 1
        except Stop:
            if done:
                sums = averages.sums.new_zeros(world.world_size, *averages.sums.shape)
                sums[world.rank] = averages.sums
                tables = {split: distributed.all_sum(sums, world), "done": torch.tensor(done)}
                facts = self._evaluation_facts()
                distributed.on_main(world, lambda: save_tables(path, tables, facts))
            raise
        if stored is not None and world.is_main:
            path.unlink(missing_ok=True)

    def _evaluation_facts(self) -> dict[str, Any]:
        """Return what the sums in EVALUATION depend on, besides settings and inputs of the run."""
        # of micro-batches, which may be others when a run is resumed
        sizes = [*map(vars(self.config).get, checkpoints.PER_PROCESS.split())]
        facts = {"step": self.step, "ranks": self.world.world_size, "code": code_digests()}
        return facts | {"sizes": sizes, "save_best": self.spec.save_best}

    # --- results that are computed once ----------------------------------------------------------

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return make(), plain data; later starts of this run read it from the folder."""
        path = self.folder / f"{name}.json"
        if not distributed.on_main(self.world, path.exists):
            self.write_json(f"{name}.json", self.evaluated(make))

        def read() -> Any:  # a result may be NaN, which strict JSON does not have
            return data.decode(data.content(path), path, decoder=data.ROWS)

        return distributed.on_main(self.world, read)

    def reference_logps(
        self, numerics: dict, examples: dict, rows: dict, score: Callable[..., Tensor]
    ) -> dict[str, Tensor]:
        """Return the log-probs of each split under the reference, [examples, S], scored once a run.

        They are stored after every PART rows, and a run that is resumed scores the parts that are
        missing.

        numerics: what they depend on besides settings and inputs, as plain data.
        rows: split -> the examples that the run uses; splits without an entry are used completely.
        score(examples, rows=, phase=): log-probs under the policy before its first step; NaN for
        other rows.
        """
        examples = {split: pairs for split, pairs in examples.items() if pairs}
        rows = {split: rows.get(split, range(len(pairs))) for split, pairs in examples.items()}
        facts = numerics | {f"rows of {split}": len(used) for split, used in rows.items()}
        parts = {}
        for split, used in rows.items():
            firsts = range(0, max(1, len(used)), PART)
            parts[split] = [used[first : first + PART] for first in firsts]

        def scored(split: str, missing: Parts) -> Iterator[Tensor]:
            pairs, count = examples[split], len(parts[split])
            self.say(f"scoring {sum(map(len, missing))} of {len(pairs)} pairs of {split}")
            phase = self.phase(f"scoring {split}", count, count - len(missing))
            for part in missing:
                yield score(pairs, rows=part, phase=phase)

        return in_parts(self.folder / REFERENCE, facts, parts, scored, self.world)


def in_parts(
    path: Path,
    facts: dict[str, Any],
    parts: Mapping[str, Parts],
    compute: Callable[[str, Parts], Iterable[Tensor]],
    world: World,
) -> dict[str, Tensor]:
    """Return tables, name -> [N, K], computed in parts that are stored in a file one by one.

    So a phase that takes longer than a job may be stopped or killed, and its next start computes
    the parts that are missing. All ranks call this and get the same tables.

    facts: what the tables depend on, as plain data; a file with other facts is not used.
    parts: table -> its parts, lists of rows. compute(table, parts that are missing): yields for
    each of them a table in which all other rows are NaN.
    """
    tables = from_main(load_tables(path, facts) if world.is_main else {}, world)
    due, is_stored = 0.0, True  # a large file is not written after each part

    def save_if_due() -> None:
        nonlocal due, is_stored
        start = time.perf_counter()
        is_stored = start > due
        if is_stored:
            save_tables(path, tables, facts)
            due = start + (time.perf_counter() - start) / SAVE_FRACTION

    for name, lists in parts.items():
        table = tables.get(name)
        missing = [part for part in lists if table is None or not table[part].isfinite().all()]
        try:
            for new in compute(name, missing) if missing else ():
                tables[name] = new.where(new.isfinite(), tables.get(name, new))
                distributed.on_main(world, save_if_due)
        finally:
            if not is_stored:  # also if the run stops
                save_tables(path, tables, facts)
    return tables


def from_main(tables: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return the tensors of rank 0 on all ranks."""
    shapes = {name: [str(table.dtype), *table.shape] for name, table in tables.items()}
    result = {}
    for name, (dtype, *shape) in distributed.on_main(world, lambda: shapes).items():
        zeros = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        table = tables.get(name, zeros).to(world.device)
        result[name] = distributed.all_sum(table, world)
    return result


def save_tables(path: Path, tables: dict[str, Tensor], facts: dict) -> None:
    """Write tensors to a file whose metadata have their SHA-256 and what they depend on."""
    tables = {name: table.cpu().contiguous() for name, table in tables.items()}
    with data.write_file(path) as file:
        save_file(tables, file, metadata_of(tables, facts))


def load_tables(path: Path, facts: dict) -> dict[str, Tensor]:
    """Return the tensors of save_tables(); none if they are damaged or depend on other facts."""
    try:
        with safe_open(path, "pt") as file:
            tables = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            is_same = file.metadata() == metadata_of(tables, facts)
    except (OSError, SafetensorError):  # there is no file, or its header is damaged
        return {}
    return tables if is_same else {}


def metadata_of(tables: dict[str, Tensor], facts: dict) -> dict[str, str]:
    """Return the metadata of a file of save_tables()."""
    digest = hashlib.sha256()
    for name in sorted(tables):
        digest.update(name.encode() + tables[name].numpy().tobytes())
    return {"sha256": digest.hexdigest(), "facts": json.dumps(facts, sort_keys=True)}


def finite(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values, but None for NaN and infinity, which JSON does not have."""
    pairs = values.items()
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in pairs}


def check_finite(tensors: dict[str, Tensor], step: int) -> None:
    """Raise NonFiniteError if a tensor of a checkpoint is NaN or infinite."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(f"after step {step} {name} is not finite; it was not saved")


def write_report(folder: Path, is_complete: bool, say: Callable[[str], None]) -> str:
    """Write report.html, and if the run is complete, print its results and draw the curves.

    Return what went wrong, or "". This starts a process, so that no error in a plot can end the
    run. It prints the results first, because drawing takes a second.
    """
    program = ["-X", "utf8", "-m", "ddp_utils.tools.report"]  # in an old locale, too
    command = [sys.executable, *program, str(folder.resolve())]
    if not is_complete:
        command.append("--no_curves")
    pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, cwd=SRC, encoding="utf-8", **pipes) as process:
        printed: Any = process.stdout
        for line in printed if is_complete else ():
            say(line.rstrip("\n").replace(str(folder.resolve()), str(folder)))
        _, errors = process.communicate()
    status = process.returncode  # negative for the number of a signal, which leaves no message
    return errors.strip()[-200:] or f"it ended with status {status}" if status else ""
