"""The run folder: settings, environment, metrics, checkpoints, and how the run ended.

To resume an unfinished run, run the same command again. Rank 0 alone writes and prints, except that
each rank writes its own part of a sharded checkpoint.
"""

import ast
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
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddp_utils import (
    NonFiniteError,
    Stop,
    UserError,
    checkpoints,
    data,
    distributed,
    loggers,
    metrics,
)
from ddp_utils.checkpoints import RunSpec, inspect, lock, move_aside
from ddp_utils.distributed import World
from ddp_utils.policy import Policy

SRC = data.ROOT / "src"
REFERENCE = "reference_logps.safetensors"
SAVE_MINUTES = 15  # between two checkpoints if save_every is 0
STATUS = {0: "finished", 85: "preempted"}  # by exit status; any other is "failed"
FINISHED = "{}: this run is already finished (same settings and data)"


class RunConfig(Protocol):
    """The settings that a Run reads."""

    seed: int
    restart: bool
    deterministic: bool
    save_every: int  # steps; 0: every 15 minutes
    keep_checkpoints: int
    stop_after_minutes: float
    report_to: loggers.Name


# --- the environment -----------------------------------------------------------------------------


def environment(config: Any, world: World) -> dict[str, Any]:
    """Return what is needed to repeat a run; no environment variable is read."""
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    code = code_digests()
    return {
        "command": shlex.join(sys.orig_argv),
        "launcher": world.launcher,
        "world_size": world.world_size,
        "backend": world.backend,
        "device": metrics.device_name(world.device),
        "git_commit": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": metadata.version("transformers"),
            "peft": metadata.version("peft"),
        },
        "code_digest": hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest()[:16],
        "code": code,
        "seed": config.seed,
        "threads": torch.get_num_threads(),
        "host": platform.node(),
        "pid": os.getpid(),
        "start": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "defaults": {k: v for k, v in fields.items() if getattr(config, k) != v},
    }


def git(*arguments: str) -> str | None:
    """Return what a git command prints about the project; None if that fails."""
    program = shutil.which("git")
    if not program:
        return None
    command = [program, "-C", str(data.ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def code_digests() -> dict[str, str]:
    """Return a digest of the statements in each file of the project that this run may import.

    Keys are paths below src, or the name of the script if it is elsewhere.
    """
    files = {file for file in SRC.glob("ddp_utils/**/*.py") if "tools" not in file.parts}
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "")
        if file.suffix == ".py" and (name == "__main__" or SRC in file.parents):
            files.add(file)
    digests = {}
    for file in sorted(files):
        name = str(file.relative_to(SRC)) if SRC in file.parents else file.name
        statements = ast.unparse(ast.parse(file.read_text(encoding="utf-8")))
        digests[name] = hashlib.sha256(statements.encode()).hexdigest()[:16]
    return digests


def without_users(text: str) -> str:
    """Return the text without the user and password in URLs."""
    return re.sub(r"(:/{1,2})[^/?#\s'\"]+@", r"\1", text)


def check(spec: RunSpec, config: RunConfig, world: World) -> int:
    """Print, on rank 0, what a run would do; nothing is written. Return 0."""
    state = inspect(spec, settings_of(config), environment(config, world), config.restart)
    lines = [*spec.lines, *state.lines, f"run folder: {spec.folder}"]
    if state.action == "finished":
        lines = [*spec.lines, FINISHED.format(spec.folder)]
    if world.is_main:
        print(*lines, sep="\n")
    return 0


def settings_of(config: Any) -> dict[str, Any]:
    """Return the settings as they are in config.json."""
    return json.loads(without_users(json.dumps(dataclasses.asdict(config))))


# --- the run -------------------------------------------------------------------------------------


class Run:
    """One run in its folder, new or resumed. A context manager: leaving it writes summary.json.

    Methods are called on all ranks, unless they say otherwise.
    """

    def __init__(self, spec: RunSpec, config: RunConfig, world: World):
        self.spec = spec
        self.config = config
        self.world = world
        self.folder = spec.folder
        self.checkpoints = spec.folder / "checkpoints"
        self.steps = spec.steps
        self.start = time.perf_counter()  # minus the seconds of earlier starts
        self.save_seconds = 0.0
        self.results: dict[str, Any] = {}  # split -> the numbers of its last evaluation
        self.validated = 0  # steps before the last validation
        self.best_validation: dict[str, float] = {}  # with save_best
        self.training: Any = None  # policy, optimizer and schedule, once they exist
        self.must_stop = False  # as all ranks have agreed in the last step
        self.must_save = False
        self.metrics: Any = None  # these three exist on rank 0 only
        self.logger: Any = None
        self.lock: Any = None
        self.bar = loggers.Bar(world.is_main)
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # CUDA requires this
            torch.use_deterministic_algorithms(True)
        self.done = distributed.on_main(world, self._open)  # steps of earlier starts
        self.step = self.saved = self.done
        self.saved_at = time.perf_counter()

    def _open(self) -> int:
        """Create, resume or replace the folder, on rank 0; raise Stop if nothing is left to do."""
        settings = settings_of(self.config)
        facts = environment(self.config, self.world)
        state = inspect(self.spec, settings, facts, self.config.restart)
        if state.action == "finished":
            raise Stop(FINISHED.format(self.folder), 0)
        if state.action == "move aside":
            held = lock(self.folder)
            self.say(f"{self.folder} has an earlier run: moved to {move_aside(self.folder)}")
            held.release()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock(self.folder)
        if state.action != "resume" and (self.folder / "config.json").exists():
            raise UserError(checkpoints.in_use(self.folder))  # another process was faster
        self.step = state.step
        self.logger = loggers.make(self.config.report_to, self.folder, self.step, settings)
        for line in state.lines:
            self.say(line)
        self._write("environment.json", facts | {"inputs": self.spec.inputs})
        self.write_summary("running", 0)
        self._write("config.json", settings)  # last: a folder with this file has a run
        self.metrics = open(self.folder / "metrics.jsonl", "ab", buffering=0)  # noqa: SIM115
        size = min(state.metrics_bytes, self.metrics.seek(0, os.SEEK_END))
        self.metrics.truncate(size)  # the steps after the checkpoint are done again
        self.bar.begin("", self.steps, self.step)
        return self.step

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        code = distributed.exit_code(error)
        try:
            if self.world.is_main:
                self._close(error, code)
        except OSError:  # on a full disk; the first error counts
            if error is None:
                raise

    def _close(self, error: BaseException | None, code: int) -> None:
        self.write_summary(STATUS.get(code, "failed"), code)
        lines, problem = write_report(self.folder, with_curves=error is None)
        if problem:
            self.say(f"warning: no report.html: {problem}")
        self.bar.close()
        self.logger.close()
        self.metrics.close()
        self.lock.release()
        if error is None:
            self.say(lines.replace(str(self.folder.resolve()), str(self.folder)))
        elif self.saved and code != 85:
            self.say(f"run the same command to resume after step {self.saved}")

    # --- messages and files ----------------------------------------------------------------------

    def say(self, line: str) -> None:
        """Print one line on rank 0."""
        if self.world.is_main:
            self.bar.say(line)

    def describe(self, **rows: str) -> None:
        """Print what the run trains, with what, and on which data; write data_report.json."""
        ranks = f"{self.world.world_size} x {self.world.device.type}"
        for name, text in {"ranks": ranks, **rows, "folder": f"{self.folder}/"}.items():
            self.say(loggers.row(name, without_users(text)))
        cores = os.cpu_count() or 1
        if self.world.device.type == "cpu" and self.world.local_size > cores:
            self.say(f"warning: {self.world.local_size} processes use {cores} cores")
        self.write_json("data_report.json", self.spec.report)
        for line in self.spec.lines:
            self.say(loggers.row("data", without_users(line)))

    def log(
        self, step: int, values: dict[str, float], split: str = "train", echo: bool = True
    ) -> None:
        """Append one line to metrics.jsonl in full precision; echo: print it as well."""
        if split != "test":
            self.step = step
        if split == "val":
            self._note_validation(step, values)
        if not self.world.is_main:
            return
        line: dict[str, Any] = {"split": split, "step": step}
        for name, value in values.items():
            line[name] = finite(value)
        self.metrics.write((json.dumps(line) + "\n").encode())
        self.logger.log(split, step, values)
        texts = loggers.columns(values)
        if split == "train":
            self.bar.reach(step, texts if len(texts) < 4 else [texts[0], *texts[-2:]])
        if echo and not (split == "train" and self.bar.is_shown):
            title = f"step {step:5d}" if split == "train" else f"{split:>10}"
            self.say(" | ".join([title, *texts]))

    def _note_validation(self, step: int, values: dict[str, float]) -> None:
        self.validated = step
        loss = values.get("loss", values.get("kl"))
        lowest = self.results.get("best", {"loss": math.inf})["loss"]
        if self.spec.save_best and loss is not None and loss < lowest:
            self.results["best"] = {"loss": loss, "step": step}
            self.best_validation = dict(values)

    def validate(self, step: int, is_due: bool, evaluate: Callable[[], dict[str, float]]) -> None:
        """Log evaluate() if it is due and no earlier start of the run has logged it."""
        if is_due and (self.validated < step or step == self.steps == 0):
            values = evaluate()
            self.results["val"] = values
            self.log(step, values, "val")

    def write_json(self, name: str, content: Any) -> None:
        """Write plain data to a file of the run folder, on rank 0."""
        if self.world.is_main:
            self._write(name, content)

    def write_text(self, name: str, text: str) -> None:
        """Write a text to a file of the run folder, on rank 0, without control characters."""
        if self.world.is_main:
            data.write_text(self.folder / name, data.printable(text))

    def write_summary(self, status: str, code: int) -> None:
        """Write the status of the run and its results to summary.json, on rank 0."""
        summary: dict[str, Any] = {
            "status": status,
            "exit_code": code,
            "run_id": os.environ.get("TORCHELASTIC_RUN_ID"),  # of the launcher and its restarts
            "step": self.step,
            "world_size": self.world.world_size,
            "seconds": round(time.perf_counter() - self.start, 3),
            "save_seconds": round(self.save_seconds, 3),
        }
        for split, values in self.results.items():
            summary[split] = {name: finite(value) for name, value in values.items()}
        self._write("summary.json", summary)

    def _write(self, name: str, content: Any) -> None:
        text = without_users(json.dumps(content, indent=2))
        data.write_text(self.folder / name, text + "\n")

    # --- checkpoints -----------------------------------------------------------------------------

    def restore(self, policy: Policy, optimizer: Any, schedule: Any) -> int:
        """Load the newest checkpoint, if there is one; return the number of steps done."""
        self.training = (policy, optimizer, schedule)
        if not self.done:
            return 0
        checkpoints.check_visible(checkpoints.path_of(self.checkpoints, self.done), self.world)
        manifest = self._load(self.done)
        self.validated = manifest["validated"]
        self.results = manifest["results"] | self.results
        self.best_validation = manifest["best_validation"]
        if self.spec.save_best is False:  # an earlier start may have had it
            self.results.pop("best", None)
        self.start -= manifest["seconds"]
        self.save_seconds = manifest["save_seconds"]
        if self.best not in (None, self.done):
            self._check_best()
        return self.done

    def _load(self, step: int) -> dict[str, Any]:
        policy, optimizer, schedule = self.training
        path = checkpoints.path_of(self.checkpoints, step)
        tensors, manifest = checkpoints.read(path, self.world.rank)
        policy.load_state(optimizer, schedule, tensors, step, manifest["shard_layout"])
        return manifest

    @property
    def best(self) -> Any:
        """The step with the lowest validation loss, whose checkpoint is kept, with save_best."""
        return self.results.get("best", {}).get("step") if self.spec.save_best else None

    def _check_best(self) -> None:
        path = checkpoints.path_of(self.checkpoints, self.best)
        problem = distributed.on_main(self.world, lambda: checkpoints.find_problem(path))
        if problem:
            raise UserError(f"{path}: {problem}; without --save_best the last weights are used")

    def restore_best(self) -> int:
        """Load the weights with the lowest validation loss, with save_best; return their step."""
        if self.best in (None, self.step):
            return self.step
        self.save()  # a run that is killed after this resumes from its last step
        self._check_best()
        self._load(self.best)
        self.results["val"] = self.best_validation
        loss = self.results["best"]["loss"]
        self.say(f"save_best: back to step {self.best}, validation loss {loss:.4f}")
        return self.best

    def save(self) -> None:
        """Write a checkpoint of the steps done, and remove the oldest."""
        if self.saved == self.step or self.training is None:
            return
        start = time.perf_counter()
        policy, optimizer, _ = self.training
        tensors = policy.state(optimizer, self.spec.shard_layout)
        distributed.on_each(self.world, lambda: check_finite(tensors, self.step))
        facts: dict[str, Any] = {
            "world_size": self.world.world_size,
            "shard_layout": self.spec.shard_layout,
            "validated": self.validated,
            "results": self.results,
            "best_validation": self.best_validation,
            "seconds": time.perf_counter() - self.start,
            "save_seconds": self.save_seconds,
        }
        if self.world.is_main:
            os.fsync(self.metrics.fileno())  # before a checkpoint contains its size
            facts["metrics_bytes"] = self.metrics.seek(0, os.SEEK_END)
        is_sharded = bool(self.spec.shard_layout)
        checkpoints.write(self.checkpoints, self.step, tensors, facts, self.world, is_sharded)
        if self.world.is_main:
            keep = self.config.keep_checkpoints
            checkpoints.remove_old(self.checkpoints, keep, self.step, self.best)
        self.saved = self.step
        self.saved_at = time.perf_counter()
        self.save_seconds += self.saved_at - start

    def reduce(self, averages: metrics.Averages, grad_norm: Tensor) -> dict[str, float]:
        """Return the means of a step and its gradient norm.

        The same reduction tells all ranks whether one was asked to stop, and whether the last
        checkpoint is too old.
        """
        age = time.perf_counter() - self.saved_at
        is_late = self.config.save_every == 0 and age > 60 * SAVE_MINUTES
        votes: dict[str, float] = {
            "stop": distributed.stop_requested(self.config.stop_after_minutes),
            "save": is_late and self.world.is_main,
        }
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

    def stop_if_requested(self) -> None:
        """Between two forwards, save and raise Stop if a rank was asked to stop."""
        is_asked = distributed.stop_requested(self.config.stop_after_minutes)
        vote = torch.tensor([float(is_asked)], device=self.world.device)
        self.must_stop = distributed.all_sum(vote, self.world).item() > 0
        if self.must_stop:
            self.save_if_due(False)

    # --- results that are computed once ----------------------------------------------------------

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Return make(), plain data; later starts of this run read it from the folder."""
        file = f"{name}.json"

        def read() -> Any:
            path = self.cached_file(file, {})
            return json.loads(path.read_text(encoding="utf-8")) if path else None

        value = distributed.on_main(self.world, read)
        if value is None:
            self.say(f"making {file}")
            value = make()
            self.write_json(file, value)
            self.add_cached_file(file, {})
        return value

    def reference_logps(
        self,
        numerics: dict[str, Any],
        examples: dict[str, Any],
        rows: dict[str, Any],
        score: Callable[[Any, Sequence[int]], Tensor],
    ) -> dict[str, Tensor]:
        """Return the log-probs of each split under the reference, [examples, S], scored once a run.

        numerics: what they depend on besides settings and inputs, as plain data.
        rows: split -> the examples that the run uses; splits without an entry are used completely.
        score(examples, rows): log-probs under the policy before its first step; NaN for other rows.
        """
        rows = {split: range(len(all_rows)) for split, all_rows in examples.items()} | rows
        counts = {f"rows of {split}": len(used) for split, used in rows.items()}
        fingerprint = numerics | counts
        path = self.folder / REFERENCE
        is_stored = distributed.on_main(
            self.world, lambda: self.cached_file(REFERENCE, fingerprint) is not None
        )
        stored = load_file(path) if is_stored and self.world.is_main else {}
        tables = {}
        for split, pairs in examples.items():
            if not pairs:
                continue
            if is_stored:  # from rank 0 to all
                table = stored.get(split, torch.zeros(len(pairs), 2))
                tables[split] = distributed.all_sum(table.to(self.world.device), self.world)
            else:
                used = rows[split]
                number = f"{len(used)} of {len(pairs)}" if len(used) < len(pairs) else len(used)
                self.say(f"scoring {number} pairs of {split} with the reference")
                tables[split] = score(pairs, used)
        if self.world.is_main and not is_stored:
            with data.write_file(path) as file:
                save_file({name: table.cpu().contiguous() for name, table in tables.items()}, file)
            self.add_cached_file(REFERENCE, fingerprint)
        return tables

    def cached_file(self, name: str, fingerprint: dict) -> Path | None:
        """Return the path of a file that an earlier start has stored, on rank 0.

        None if there is none, if it depends on something else, or if it is damaged.
        """
        path = self.folder / name
        try:
            entry = data.read_json(facts_of(path))
        except UserError:
            return None
        if entry.get("fingerprint") != fingerprint or not path.is_file():
            return None
        if data.sha256(path) != entry.get("sha256"):
            self.say(f"warning: {path} does not match its SHA-256; it is computed again")
            return None
        return path

    def add_cached_file(self, name: str, fingerprint: dict) -> None:
        """Store what a file that was just written depends on, for later starts, on rank 0."""
        if self.world.is_main:
            path = self.folder / name
            facts = {"sha256": data.sha256(path), "fingerprint": fingerprint}
            data.write_json(facts_of(path), facts)


def facts_of(path: Path) -> Path:
    """Return the path of the SHA-256 and the fingerprint of a cached file."""
    return path.with_suffix(".facts.json")


def finite(value: Any) -> Any:
    """Return the value, but None for NaN and infinity, which JSON does not have."""
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite else None


def check_finite(tensors: dict[str, Tensor], step: int) -> None:
    """Raise NonFiniteError if a tensor of a checkpoint is NaN or infinite."""
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise NonFiniteError(f"after step {step} {name} is not finite; it was not saved")


def write_report(folder: Path, with_curves: bool) -> tuple[str, str]:
    """Write report.html and the curves; return the results in a few lines, and what went wrong.

    This starts a process, so that no error in a plot can end the run.
    """
    command = [sys.executable, "-m", "ddp_utils.tools.report", str(folder.resolve())]
    if not with_curves:
        command.append("--no_curves")
    done = subprocess.run(command, cwd=SRC, capture_output=True, text=True)
    return done.stdout.rstrip(), done.stderr.strip()[-200:] if done.returncode else ""
