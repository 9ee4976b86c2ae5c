"""The state of a training on the disk: saved, put back, and left when it is time to stop."""

import os
import time

import torch

from ddp_utils import NonFiniteError, Stop, UserError, distributed
from ddp_utils.runs import checkpoint, preemption

CHECKPOINTS = "checkpoints"
SAVE_MINUTES = 15  # between two checkpoints, where save_every leaves it open


class Saving:
    """What run.Run does with the policy, the optimizer and the schedule; on all ranks alike."""

    def restore(self, policy, optimizer, schedule) -> int:
        """From here on there is a state to save; put back the checkpoint, if this run has one.

        Returns the number of steps already done.
        """
        self.training = policy, optimizer, schedule
        if not self.done:
            return 0
        path = checkpoint.path(self.folder / CHECKPOINTS, self.done)
        if not path.exists() or checkpoint.mark(path) != self.mark:
            raise UserError(
                f"{path}: rank {self.world.rank} does not see the checkpoint that rank 0 sees; "
                "the run folder must be on a disk that all nodes share"
            )
        tensors, meta = checkpoint.read(path, self.world.rank)
        shares = meta.get("shares", "")
        policy.load_state(optimizer, schedule, tensors, self.done, shares)
        self.validated, self.results = meta["validated"], meta["results"] | self.results
        self.start -= meta["seconds"]
        self.save_seconds = meta["save_seconds"]
        self.val_of_best = meta.get("val_of_best", {})
        if not getattr(self.config, "save_best", True):  # it may have been asked for before
            self.results.pop("best", None)
        if self.best not in (None, self.done):
            self._check_best()
        return self.done

    @property
    def best(self):
        """The steps before the lowest validation loss, whose checkpoint is kept; with save_best."""
        asked = getattr(self.config, "save_best", False)
        return self.results.get("best", {}).get("step") if asked else None

    def back_to_best(self) -> int:
        """After the last step, on all ranks: the weights of the lowest validation loss again.

        Without save_best those of the last step stay. Returns the steps that made them.
        """
        if self.best in (None, self.step):
            return self.step
        self.save()  # a run that is killed from here on goes on from its last step
        tensors, meta = checkpoint.read(self._check_best(), self.world.rank)
        policy, optimizer, schedule = self.training
        policy.load_state(optimizer, schedule, tensors, self.best, meta.get("shares", ""))
        self.results["val"] = self.val_of_best
        loss = self.results["best"]["loss"]
        self.say(f"save_best: back to step {self.best}, validation loss {loss:.4f}")
        return self.best

    def _check_best(self):
        """The checkpoint of the lowest validation loss; UserError if it is not whole any more."""
        path = checkpoint.path(self.folder / CHECKPOINTS, self.best)
        if problem := distributed.on_main(self.world, lambda: checkpoint.verify(path)):
            raise UserError(f"{path}: {problem}; without --save_best the last model is kept")
        return path

    def save(self):
        """Write a checkpoint of the steps done, check it, remove the oldest; on all ranks."""
        if self.saved == self.step:
            return
        start, folder = time.perf_counter(), self.folder / CHECKPOINTS
        policy, optimizer, _ = self.training
        tensors = policy.state(optimizer, self.shares)

        def check():
            for name, tensor in tensors.items():
                if not bool(torch.isfinite(tensor).all()):
                    raise NonFiniteError(f"after step {self.step} {name} is not finite; not saved")

        distributed.on_each(self.world, check)
        parts = self._write_shares(folder, tensors) if self.shares else None

        def write():
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
                "shares": self.shares,
            }
            checkpoint.write(folder, self.step, tensors, meta, parts)
            checkpoint.rotate(folder, self.config.keep_checkpoints, self.step, self.best)

        distributed.on_main(self.world, write)
        self.saved, self.saved_at = self.step, time.perf_counter()
        self.save_seconds += self.saved_at - start

    def _write_shares(self, folder, tensors):
        """Each rank's part of a checkpoint: name -> hash, on all ranks."""
        world = self.world
        distributed.on_main(world, lambda: checkpoint.clear(folder, self.step))
        place = folder, self.step, tensors, world.rank, world.world_size
        name, digest = distributed.on_each(world, lambda: checkpoint.write_share(*place))
        mine = f"-{world.rank:05d}-"
        digests = distributed.by_rank(digest, world)
        return {name.replace(mine, f"-{rank:05d}-"): found for rank, found in enumerate(digests)}

    def end_step(self, due):
        """After each step, on all ranks: save if it is `due` or late, stop if one was asked to."""
        waited = time.perf_counter() - self.saved_at
        late = self.config.save_every == 0 and waited > SAVE_MINUTES * 60
        self.poll(due or self.best == self.step, late and self.world.is_main)

    def poll(self, due=False, late=False):
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
