"""What a run keeps in its folder for later starts of it: checkpoints, and what it computes once."""

import json
import os
import shutil
import time

import torch
from safetensors.torch import load_file, save_file

from ddp_utils import NonFiniteError, Stop, distributed
from ddp_utils.data import sha256
from ddp_utils.runs import checkpoint

REFERENCE = "reference_logps.safetensors"
SAVE_MINUTES = 15  # between two checkpoints, where save_every leaves it open


class Saving:
    """The part of Run that saves and reads; on all ranks alike.

    Checkpoints hold policy, optimizer and schedule. Of other files manifest.json has the hash and
    the fingerprint: what the content depends on, as plain data; with another one it is made again.
    """

    def restore(self, policy, optimizer, schedule) -> int:
        """Put back the checkpoint of this run, if there is one; return the steps already done."""
        self.training = (policy, optimizer, schedule)
        if self.done:
            from ddp_utils.runs import resume

            resume.restore(self)
        return self.done

    def load(self, path, step):
        """Load a checkpoint into policy, optimizer and schedule; return its manifest."""
        tensors, meta = checkpoint.read(path, self.world.rank)
        policy, optimizer, schedule = self.training
        policy.load_state(optimizer, schedule, tensors, step, meta["shares"])
        return meta

    @property
    def best(self):
        """The steps before the lowest validation loss, whose checkpoint is kept; with save_best."""
        return self.results.get("best", {}).get("step") if self.spec.save_best else None

    def restore_best(self) -> int:
        """After the last step, load the weights of the lowest validation loss, with save_best.

        Return the steps that made the weights.
        """
        if self.best in (None, self.step):
            return self.step
        from ddp_utils.runs import resume

        self.save()  # a run that is killed from here on goes on from its last step
        return resume.restore_best(self)

    def save(self):
        """Write a checkpoint of the steps done, verify it, remove the oldest; on all ranks."""
        if self.saved == self.step:
            return
        start = time.perf_counter()
        policy, optimizer, _ = self.training
        tensors = policy.state(optimizer, self.spec.shares)

        def check():
            for name, tensor in tensors.items():
                if not bool(torch.isfinite(tensor).all()):
                    raise NonFiniteError(f"after step {self.step} {name} is not finite; not saved")

        distributed.on_each(self.world, check)
        shares = None
        if self.spec.shares:
            from ddp_utils.runs.shares import write_shares

            shares = write_shares(self.checkpoints, self.step, tensors, self.world)
        distributed.on_main(self.world, lambda: self._write_checkpoint(tensors, shares))
        self.saved = self.step
        self.saved_at = time.perf_counter()
        self.save_seconds += self.saved_at - start

    def _write_checkpoint(self, tensors, shares):
        self._flush()  # to the disk, before a checkpoint says how long they are
        os.fsync(self.metrics.fileno())
        meta = {
            "world_size": self.world.world_size,
            "metrics_bytes": self.metrics.tell(),
            "validated": self.validated,
            "results": self.results,
            "val_of_best": self.val_of_best,
            "seconds": time.perf_counter() - self.start,
            "save_seconds": self.save_seconds,
            "shares": self.spec.shares,
        }
        checkpoint.write(self.checkpoints, self.step, tensors, meta, shares)
        checkpoint.rotate(self.checkpoints, self.config.keep_checkpoints, self.step, self.best)

    def save_if_due(self, due):
        """After each step, on all ranks: save if it is `due` or late, stop if one was asked to."""
        self._save_or_stop(self.is_late or due or self.best == self.step, self.is_to_stop)

    def reduce(self, averages, grad_norm) -> dict:
        """Return the means of a step and its gradient norm; on the way all ranks learn whether one
        was asked to stop, and whether the last checkpoint is too old."""
        waited = time.perf_counter() - self.saved_at
        late = self.config.save_every == 0 and waited > SAVE_MINUTES * 60
        summed = {"asked": distributed.stop_requested(self.config.stop_after_minutes)}
        summed["late"] = late and self.world.is_main
        means = averages.reduce(summed, {"grad_norm": grad_norm})
        self.is_to_stop = means.pop("asked") > 0
        self.is_late = means.pop("late") > 0
        return means

    def stop_if_requested(self):
        """Between two forwards, on all ranks: if one was asked to stop, save and stop together."""
        asked = float(distributed.stop_requested(self.config.stop_after_minutes))
        votes = torch.tensor([asked], device=self.world.device)
        self._save_or_stop(False, distributed.all_sum(votes, self.world).item() > 0)

    def _save_or_stop(self, due, stop):
        if self.training and (stop or due):
            self.save()
        if stop:
            raise Stop(f"stopped after step {self.step}; the same command goes on from there", 85)

    # --- what is computed once, and read again by later starts -----------------------------------

    def once(self, name, make):
        """Return make(), plain data, called on all ranks by the first start of this run."""
        file = f"{name}.json"

        def read():
            path = self.cached_file(file, {})
            return json.loads(path.read_text()) if path else None

        value = distributed.on_main(self.world, read)
        if value is None:
            self.say(f"making {file}")
            value = make()
            self.write_json(file, value)
            self.add_cached_file(file, {})
        return value

    def reference_logps(self, fingerprint, data, score, other=""):
        """Return the reference's log-probs of each split, [pairs, 2], on all ranks.

        data: split -> pairs; score(pairs): their log-probs now, asked for once a run; other: a run
        folder whose log-probs are read instead. Raises UserError if those have another fingerprint.
        """
        data = {split: pairs for split, pairs in data.items() if pairs}
        path = distributed.on_main(self.world, lambda: self._known_logps(fingerprint, other))
        tables = {}
        if path and self.world.is_main:
            tables = load_file(path)
        for split, pairs in data.items():
            if path:
                table = tables.get(split, torch.zeros(len(pairs), 2))
                tables[split] = distributed.all_sum(table.to(self.world.device), self.world)
            else:
                self.say(f"scoring {len(pairs)} pairs of {split} with the reference")
                tables[split] = score(pairs)
        if self.world.is_main:
            path = self.folder / REFERENCE
            save_file({split: table.cpu().contiguous() for split, table in tables.items()}, path)
            shutil.copymode(self.folder / "config.json", path)
            self.add_cached_file(REFERENCE, fingerprint)
        return tables

    def _known_logps(self, fingerprint, other) -> str:
        path = self.cached_file(REFERENCE, fingerprint)
        if other and not path:
            from ddp_utils.runs import resume

            path = resume.logps_of(other, REFERENCE, fingerprint)
            self.say(f"reference log-probs: those of {other}")
        return str(path or "")

    def cached_file(self, name, fingerprint):
        """Return the path of a file that an earlier start of this run has left whole, or None."""
        path = self.folder / name
        entry = self.cached_files.get(name)
        if entry is None or entry.get("fingerprint") != fingerprint:
            return None
        if path.is_file() and sha256(path) == entry["sha256"]:
            return path
        self.say(f"warning: {path} does not match its sha256: it is made again")
        return None

    def add_cached_file(self, name, fingerprint):
        """Remember a file that has just been written, with its hash, for later starts."""
        if self.world.is_main:
            digest = sha256(self.folder / name)
            self.cached_files[name] = {"sha256": digest, "fingerprint": fingerprint}
            checkpoint.write_manifest(self.folder, {"files": self.cached_files})
