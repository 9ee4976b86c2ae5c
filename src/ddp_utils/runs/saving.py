"""The state of a training on the disk: saved, put back, and left when it is time to stop."""

import os
import time

import torch

from ddp_utils import NonFiniteError, Stop, UserError, distributed
from ddp_utils.runs import checkpoint, preemption

SAVE_MINUTES = 15  # between two checkpoints, where save_every leaves it open


class Saving:
    """The part of Run that saves policy, optimizer and schedule; on all ranks alike."""

    def restore(self, policy, optimizer, schedule) -> int:
        """Put back the checkpoint of this run, if there is one; return the steps already done."""
        self.training = (policy, optimizer, schedule)
        if not self.done:
            return 0
        path = checkpoint.path(self.checkpoints, self.done)
        if not path.exists() or checkpoint.mark(path) != self.mark:
            raise UserError(
                f"{path}: rank {self.world.rank} does not see the checkpoint that rank 0 sees; "
                "the run folder must be on a disk that all nodes share"
            )
        meta = self._load(path, self.done)
        self.validated = meta["validated"]
        self.results = meta["results"] | self.results
        self.val_of_best = meta["val_of_best"]
        self.start -= meta["seconds"]
        self.save_seconds = meta["save_seconds"]
        if self.best not in (None, self.done):
            self._check_best()
        return self.done

    def _load(self, path, step):
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
        self.save()  # a run that is killed from here on goes on from its last step
        self._load(self._check_best(), self.best)
        self.results["val"] = self.val_of_best
        loss = self.results["best"]["loss"]
        self.say(f"save_best: back to step {self.best}, validation loss {loss:.4f}")
        return self.best

    def _check_best(self):
        """Return the checkpoint of the lowest validation loss; UserError if it is not whole."""
        path = checkpoint.path(self.checkpoints, self.best)
        problem = distributed.on_main(self.world, lambda: checkpoint.verify(path))
        if problem:
            raise UserError(f"{path}: {problem}; without --save_best the last model is kept")
        return path

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
            from ddp_utils.sharding.shares import write_shares

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
        waited = time.perf_counter() - self.saved_at
        late = self.config.save_every == 0 and waited > SAVE_MINUTES * 60
        self.stop_if_requested(due or self.best == self.step, late and self.world.is_main)

    def stop_if_requested(self, due=False, late=False):
        """Between two forwards, on all ranks: if one was asked to stop, save and stop together."""
        asked = preemption.asked(self.config.stop_after_minutes)
        flags = torch.tensor([float(asked), float(late)], device=self.world.device)
        stop, late = distributed.all_sum(flags, self.world).tolist()
        if stop:
            preemption.saving()
        if self.training and (stop or late or due):
            self.save()
        if stop:
            raise Stop(f"stopped after step {self.step}; the same command goes on from there", 85)
