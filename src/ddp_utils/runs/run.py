"""The run folder: settings, environment, metrics, curves and a summary, written by rank 0 alone."""

import dataclasses
import json
import math
import os
import time
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from ddp_utils import Stop, UserError, distributed, files, jsonl
from ddp_utils.runs import checkpoint, environment, plots, progress, resume
from ddp_utils.runs.saving import Saving
from ddp_utils.tools import report

STATUS = {0: "finished", 85: "preempted"}  # by exit status; any other: failed
# what may differ between two lives of a run: its numbers are then equal but for rounding
CHANGED = ("world_size", "device", "threads", "versions")
FINISHED = "{} holds this run, finished: the same settings, the same data"
COLUMNS = ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
COLUMNS += ("kl", "kl_base", "share_baked", "accuracy", "fraction_of_optimum")


class Run(Saving):
    """One run folder. A context manager: leaving it says in summary.json how the run ended.

    A folder that holds an unfinished run with the same settings and inputs is continued: see
    resume.py. config: seed, save_every, keep_checkpoints, stop_after_minutes, restart; inputs:
    name -> digest of data and models; needed: bytes that it will write at the least; shares: as
    Strategy.shares() says.
    """

    def __init__(self, folder, config, world, steps, inputs=None, needed=0, shares=""):
        self.folder = Path(folder)
        self.config, self.world, self.steps = config, world, steps
        self.shares = shares
        self.start = time.perf_counter()
        self.results = {}  # split -> the numbers of its last evaluation
        self.validated = 0  # steps before that of val
        self.val_of_best = {}  # of the lowest validation loss, with save_best
        self.step = 0
        self.training = None
        self.save_seconds = 0.0
        self.cached_files = {}  # name -> hash and fingerprint of what later starts may read
        self.metrics = self.board = self.lock = None
        self.bar = progress.Bar(world.is_main)
        settings = environment.redacted(dataclasses.asdict(config))
        opened = distributed.on_main(world, lambda: self._open(settings, inputs or {}, needed))
        self.done, self.mark = opened  # steps before this start, and the checkpoint that has them
        self.saved = self.step = self.done
        self.saved_at = time.perf_counter()

    @classmethod
    def would(cls, folder, config, steps, inputs, needed):
        """Lines on what a run with these settings would do to the folder; nothing is written."""
        settings = environment.redacted(dataclasses.asdict(config))
        facts = settings, steps, inputs, environment.code(), needed
        found = resume.inspect(folder, *facts, config.restart, config.same_code)
        if found.verdict == "finished":
            return [FINISHED.format(folder)]
        return [*found.lines, f"run folder: {folder}"]

    def _open(self, settings, inputs, needed):
        """Lock, move aside or continue; returns the steps already done and the checkpoint's mark.

        Raises Stop if there is nothing left to do.
        """
        self.run_id = os.environ.get("TORCHELASTIC_RUN_ID")  # the same when it is started again
        restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        again = restarted and resume.summary(self.folder).get("run_id") == self.run_id
        restart = self.config.restart and not again
        described = environment.describe(self.config, self.world)
        facts = settings, self.steps, inputs, described["code"], needed
        found = resume.inspect(self.folder, *facts, restart, self.config.same_code)
        if found.verdict == "finished":
            raise Stop(FINISHED.format(self.folder), 0)
        if found.verdict == "aside":
            held = resume.lock(self.folder)
            self.say(f"{self.folder} held an earlier run: moved to {resume.aside(self.folder)}")
            held.release()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = resume.lock(self.folder)
        if found.verdict != "continue" and (self.folder / "config.json").exists():
            raise UserError(resume.going_on(self.folder))  # another one was quicker
        path, meta = found.checkpoint, {"step": 0, "metrics_bytes": 0}
        if path:
            meta = checkpoint.read_manifest(path)
            shares = meta.get("shares")
            if shares and shares != self.shares:
                raise UserError(
                    f"{path}: each process has saved its share: {shares}; this is "
                    f"{self.shares or 'another strategy, or one process'}; "
                    "start as many, in the same way"
                )
        if found.verdict == "continue":
            self.say(f"{self.folder} is not finished: goes on after step {meta['step']}")
            before = checkpoint.read_json(self.folder / "environment.json")
            before = {name: before.get(name) for name in CHANGED}
            for line in resume.differences(before, described):
                self.say(f"{line}; equal but for rounding")
            self._read_cached_files()
        for line in found.lines:
            self.say(line)
        self.step = meta["step"]
        self._write("environment.json", described | {"inputs": inputs})
        self.write_summary("running", 0)
        self._write("config.json", settings)  # last: from here on there is a run
        self.metrics = open(self.folder / "metrics.jsonl", "ab")  # noqa: SIM115
        size = self.metrics.seek(0, os.SEEK_END)  # what came after the checkpoint comes again
        self.metrics.seek(self.metrics.truncate(min(meta["metrics_bytes"], size)))
        if getattr(self.config, "report_to", "tensorboard") == "tensorboard":
            self.board = SummaryWriter(self.folder / "tensorboard", purge_step=meta["step"] + 1)
        self.bar.of_run(self.steps, meta["step"])
        return meta["step"], checkpoint.mark(path) if path else ""

    # --- what happens ----------------------------------------------------------------------------

    def say(self, line):
        """One line to the user, above the progress bar if there is one; silence elsewhere."""
        if self.world.is_main:
            self.bar.say(line)

    def log(self, step, values, split="train", echo=True):
        """Append one line of metrics: file in full precision, TensorBoard, fixed columns."""
        if split != "test":
            self.step = step
        if split == "val":
            self.validated = step
            loss = values.get("loss", values.get("kl"))
            lowest = self.results.get("best", {"loss": math.inf})["loss"]
            if getattr(self.config, "save_best", False) and loss < lowest:
                self.results["best"] = {"loss": loss, "step": step}
                self.val_of_best = dict(values)
        if not self.world.is_main:
            return
        line = json.dumps({"split": split, "step": step, **_finite(values)}) + "\n"
        self.metrics.write(line.encode())
        self._flush()
        for name, value in values.items():
            if self.board and name != "count":
                self.board.add_scalar(f"{split}/{name}", value, step)
        if split == "train":
            self.bar.reach(step)
        if echo and not self.bar.speaks:
            shown = [(name.rsplit("/")[-1], values[name]) for name in COLUMNS if name in values]
            title = f"step {step:5d}" if split == "train" else f"{split:>10}"
            self.say(" | ".join([title, *(f"{name} {value:8.4f}" for name, value in shown)]))

    def _flush(self):
        try:
            self.metrics.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self.metrics.name) from error

    def write_json(self, name, data):
        """A file of plain data in the run folder."""
        if self.world.is_main:
            self._write(name, data)

    def write_text(self, name, text):
        """A text for people in the run folder."""
        if self.world.is_main:
            (self.folder / name).write_text(jsonl.printable(text), encoding="utf-8")

    def once(self, name, make):
        """make(), on all ranks, kept as plain data: a continued run reads what it found before."""
        file = f"{name}.json"

        def known():
            path = self.cached_file(file, {})
            return json.loads(path.read_text()) if path else None

        value = distributed.on_main(self.world, known)
        if value is None:
            value = make()
            self.write_json(file, value)
            self.add_cached_file(file, {})
        return value

    def cached_file(self, name, fingerprint):
        """On rank 0, the path of a file that an earlier start of this run has left whole, or None.

        fingerprint: what its content depends on, as plain data; another one is as good as no file.
        """
        path, entry = self.folder / name, self.cached_files.get(name)
        if entry is None or entry.get("fingerprint") != fingerprint:
            return None
        if path.is_file() and files.sha256(path) == entry["sha256"]:
            return path
        self.say(f"warning: {path} does not match its sha256: it is made again")
        return None

    def add_cached_file(self, name, fingerprint, digest=None):
        """Remember a file that has just been written, with its hash, for later starts."""
        if self.world.is_main:
            digest = digest or files.sha256(self.folder / name)
            self.cached_files[name] = {"sha256": digest, "fingerprint": fingerprint}
            checkpoint.write_manifest(self.folder, {"files": self.cached_files})

    def _read_cached_files(self):
        try:
            self.cached_files = checkpoint.read_manifest(self.folder)["files"]
        except ValueError as error:
            if any(self.folder.glob("manifest.*")):  # else there is none yet
                self.say(f"warning: {self.folder}: {error}: what it names is made again")

    def write_summary(self, status, code):
        """summary.json: how it stands, and what it measured."""
        seconds = round(time.perf_counter() - self.start, 3)
        self._write(
            "summary.json",
            {
                "status": status,
                "exit_code": code,
                "run_id": self.run_id,
                "step": self.step,
                "world_size": self.world.world_size,
                "seconds": seconds,
                "save_seconds": round(self.save_seconds, 3),
                **self.results,
            },
        )

    def _write(self, name, data):
        files.write_text(self.folder / name, json.dumps(data, indent=2) + "\n")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _trace):
        told = distributed.write_error(error) or error
        try:
            if self.world.is_main:
                self._close(error, distributed.exit_code(told))
        except OSError:  # on a full disk; the first error counts
            if error is None:
                raise

    def _close(self, error, code):
        if error is None:
            plots.draw(self.folder)
        self.write_summary(STATUS.get(code, "failed"), code)
        try:
            report.write(self.folder)
        except OSError as problem:  # all that is on the page is on the disk already
            if error is None:
                self.say(f"warning: no report.html: {problem}")
        self.bar.close()
        if self.board:
            self.board.close()
        self.metrics.close()
        self.lock.release()
        if error is None:
            self.say(f"{time.perf_counter() - self.start:.0f} s -> {self.folder}/")
        elif self.saved and code != 85:
            self.say(f"the same command goes on after step {self.saved}")


def _finite(values):
    """JSON has no NaN: a value that is not finite is written as null."""
    return {k: v if math.isfinite(v) else None for k, v in values.items()}
