"""The run folder: settings, environment, metrics, curves and a summary, written by rank 0 alone."""

import dataclasses
import json
import math
import os
import subprocess
import sys
import time

import torch

from ddp_utils import Stop, UserError, distributed, loggers
from ddp_utils.data import printable, write_text
from ddp_utils.runs import checkpoint, environment, folder, progress
from ddp_utils.runs.saving import Saving

STATUS = {0: "finished", 85: "preempted"}  # by exit status; any other: failed
FINISHED = "{} holds this run, finished: the same settings, the same data"


def check(spec, config, world) -> int:
    """Print what a run would do, on rank 0, for --check; nothing is written. Return 0."""
    settings = environment.redacted(dataclasses.asdict(config))
    described = {"code": environment.code()}
    state = folder.inspect(spec, settings, described, config.restart, config.same_code)
    lines = [*state.lines, f"run folder: {spec.folder}"]
    if state.verdict == "finished":
        lines = [FINISHED.format(spec.folder)]
    if world.is_main:
        print(*spec.lines, *lines, sep="\n")
    return 0


class Run(Saving):
    """One run folder. A context manager: leaving it says in summary.json how the run ended.

    A folder that holds an unfinished run with the same settings and inputs is continued: see
    resume.py. spec: a RunSpec; config: seed, save_every, keep_checkpoints, stop_after_minutes,
    restart, same_code, deterministic.
    """

    def __init__(self, spec, config, world):
        self.spec = spec
        self.config = config
        self.world = world
        self.folder = spec.folder
        self.checkpoints = spec.folder / "checkpoints"
        self.steps = spec.steps
        self.start = time.perf_counter()
        self.results = {}  # split -> the numbers of its last evaluation
        self.validated = 0  # steps before that of val
        self.val_of_best = {}  # of the lowest validation loss, with save_best
        self.training = None
        self.save_seconds = 0.0
        self.is_to_stop = False  # as all ranks have agreed in the last step
        self.is_late = False
        self.cached_files = {}  # name -> hash and fingerprint of what later starts may read
        self.metrics = None
        self.logger = None
        self.lock = None
        self.bar = progress.Bar(world.is_main)
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or CUDA refuses to start
            torch.use_deterministic_algorithms(True)
        # steps before this start, and the mark of the checkpoint that has them
        self.done, self.manifest_hash = distributed.on_main(world, self._open)
        self.saved = self.done
        self.step = self.done
        self.saved_at = time.perf_counter()

    def _open(self):
        """Lock, move aside or continue; return the steps already done and the checkpoint's mark.

        Raises Stop if there is nothing left to do.
        """
        config = self.config
        settings = environment.redacted(dataclasses.asdict(config))
        described = environment.describe(config, self.world)
        state = folder.inspect(self.spec, settings, described, config.restart, config.same_code)
        if state.verdict == "finished":
            raise Stop(FINISHED.format(self.folder), 0)
        if state.verdict == "aside":
            held = folder.lock(self.folder)
            moved = folder.move_aside(self.folder)
            self.say(f"{self.folder} held an earlier run: moved to {moved}")
            held.release()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = folder.lock(self.folder)
        if state.verdict != "continue" and (self.folder / "config.json").exists():
            raise UserError(folder.going_on(self.folder))  # another one was quicker
        logger = loggers.LOGGERS[config.report_to]
        self.logger = logger(self.folder, state.manifest["step"], settings)
        for line in state.lines:
            self.say(line)
        self.cached_files = state.cached_files
        self.step = state.manifest["step"]
        self._write("environment.json", described | {"inputs": self.spec.inputs})
        self.write_summary("running", 0)
        self._write("config.json", settings)  # last: from here on there is a run
        self._open_metrics(state.manifest)
        self.bar.of_run(self.steps, self.step)
        return self.step, checkpoint.manifest_hash(state.checkpoint) if state.checkpoint else ""

    def _open_metrics(self, meta):
        """Open metrics.jsonl; what came after the checkpoint is cut off, and comes again."""
        self.metrics = open(self.folder / "metrics.jsonl", "ab")  # noqa: SIM115
        size = self.metrics.seek(0, os.SEEK_END)
        self.metrics.seek(self.metrics.truncate(min(meta["metrics_bytes"], size)))

    # --- what happens ----------------------------------------------------------------------------

    def say(self, line):
        """One line to the user, above the progress bar if there is one; silence elsewhere."""
        if self.world.is_main:
            self.bar.say(line)

    def describe(self, **rows):
        """Say what the run trains with and on; data_report.json has the whole report."""
        ranks = f"{self.world.world_size} x {self.world.device.type}"
        for name, text in {"ranks": ranks, **rows, "folder": f"{self.folder}/"}.items():
            self.say(progress.row(name, environment.redact(text)))
        if self.world.device.type == "cpu" and self.world.local_size > os.cpu_count():
            self.say(f"warning: {self.world.local_size} processes share {os.cpu_count()} cores")
        self.write_json("data_report.json", environment.redacted(self.spec.report))
        for line in self.spec.lines:
            self.say(progress.row("data", line))

    def validate(self, step, due, evaluate):
        """Log evaluate() if that is due after `step` steps and an earlier start has not done it."""
        if due and (self.validated < step or step == self.steps == 0):
            values = evaluate()
            self.results["val"] = values
            self.log(step, values, "val")

    def log(self, step, values, split="train", echo=True):
        """Append one line of metrics: file in full precision, TensorBoard, fixed columns."""
        if split != "test":
            self.step = step
        if split == "val":
            self.validated = step
            loss = values.get("loss", values.get("kl"))
            lowest = self.results.get("best", {"loss": math.inf})["loss"]
            if self.spec.save_best and loss < lowest:
                self.results["best"] = {"loss": loss, "step": step}
                self.val_of_best = dict(values)
        if not self.world.is_main:
            return
        line = {"split": split, "step": step}
        for name, value in values.items():
            line[name] = value if math.isfinite(value) else None  # JSON has no NaN
        self.metrics.write((json.dumps(line) + "\n").encode())
        self.logger.log(split, step, values)
        self._flush()
        texts = progress.columns(values)
        if split == "train":
            self.bar.reach(step, texts)
        if echo and not (split == "train" and self.bar.speaks):
            title = f"step {step:5d}" if split == "train" else f"{split:>10}"
            self.say(" | ".join([title, *texts]))

    def _flush(self):
        try:
            self.metrics.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.metrics.name) from error

    def write_json(self, name, data):
        """Write a file of plain data into the run folder."""
        if self.world.is_main:
            self._write(name, data)

    def write_text(self, name, text):
        """Write a text for people into the run folder, without what a terminal would obey."""
        if self.world.is_main:
            (self.folder / name).write_text(printable(text), encoding="utf-8")

    def write_summary(self, status, code):
        """summary.json: how it stands, and what it measured."""
        summary = {
            "status": status,
            "exit_code": code,
            "run_id": os.environ.get("TORCHELASTIC_RUN_ID"),  # the same when it is started again
            "step": self.step,
            "world_size": self.world.world_size,
            "seconds": round(time.perf_counter() - self.start, 3),
            "save_seconds": round(self.save_seconds, 3),
        }
        self._write("summary.json", summary | self.results)

    def _write(self, name, data):
        write_text(self.folder / name, json.dumps(data, indent=2) + "\n")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _trace):
        code = distributed.exit_code(error)
        try:
            if self.world.is_main:
                self._close(error, code)
        except OSError:  # on a full disk; the first error counts
            if error is None:
                raise

    def _close(self, error, code):
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
            self.say(f"the same command goes on after step {self.saved}")


def write_report(folder, with_curves) -> tuple[str, str]:
    """Draw the curves and write report.html, as a person may do later.

    Return the result in a few lines, and what went wrong.

    In a process of its own: no rank has to import what draws.
    """
    command = [sys.executable, "-m", "ddp_utils.tools.report", str(folder.resolve())]
    if not with_curves:
        command.append("--no_curves")
    # where the package is found, installed or not
    done = subprocess.run(command, cwd=environment.SRC, capture_output=True, text=True)
    return done.stdout.rstrip(), done.stderr.strip()[-200:] if done.returncode else ""
