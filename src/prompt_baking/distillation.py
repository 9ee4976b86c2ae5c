"""The student with the LoRA, and its teacher: the same model without the LoRA, which is prompted.

B rows, T tokens, N tokens of all replies, D width, V vocabulary size.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ddp_utils import UserError, distributed, logps, sampler, sampling
from ddp_utils.data import write_file
from ddp_utils.distributed import World
from ddp_utils.fast.self_test import choose_head_and_layout
from ddp_utils.logps import Pair
from ddp_utils.run import Run
from prompt_baking import kl_loss, trajectories
from prompt_baking.train_config import Config
from prompt_baking.trajectories import Batch, Trajectory


class Student(logps.Scorer):
    """The model with its divergence from the teacher: the module that DDP wraps."""

    model: Any  # of peft

    def forward(self, batch: Any) -> tuple[Tensor]:
        """Return the divergence of each reply [B], in nats, summed over its tokens.

        batch: trajectories.Batch.
        """
        student = self.states(batch.student)  # [N, D]
        with self.autocasting(student.device):
            head = torch.nn.Identity() if self.full_logits else self.backbone_and_head()[1]
            costs = kl_loss.head_divergence(head, student, batch.taught, batch.divergence)  # [N]
        rows = batch.student.cells[0]
        return (costs.new_zeros(len(batch.tokens)).index_add(0, rows, costs),)

    @torch.no_grad()
    def teach(self, batch: Batch) -> Batch:
        """Return the batch with the states of the prompted base model."""
        with self.model.disable_adapter():
            return batch._replace(taught=self.states(batch.teacher))

    def example(self, device: torch.device) -> Any:
        row = Trajectory([0], [0], [0], "", "")
        return self.teach(trajectories.collate([row], device, self.shared))


def check_head(
    student: Student, rows: list[Trajectory], world: World, cache_teacher: bool
) -> list[str]:
    """Test the output layer on real rows; return lines to print.

    Raises UserError if output layer or embedding are trained, or cannot be used with a cache.
    """
    for layer in (student.backbone_and_head()[1], student.unwrap().get_input_embeddings()):
        if layer and any(parameter.requires_grad for parameter in layer.parameters()):
            problem = "output layer and embedding cannot be trained (the teacher uses them as well)"
            raise UserError(f"--lora_targets: {problem}; leave them out")
    pairs = [Pair(row.student, row.reply, row.reply, "", "") for row in rows[:2]]
    lines = choose_head_and_layout(student, pairs, "auto", world)
    if student.full_logits and cache_teacher:
        problem = "not supported for this model, whose output layer is not a plain one"
        raise UserError(f"--cache_teacher: {problem}; leave it out")
    return lines


def adapter_of(student: Student, baked: bool) -> contextlib.AbstractContextManager:
    """Return a context in which the model has its LoRA, or in which it is the base model."""
    return contextlib.nullcontext() if baked else student.model.disable_adapter()


class Teacher:
    """Makes batches that contain the states of the prompted base model.

    The states are computed for each batch. With cache_teacher they are computed once and stored in
    the run folder, one file per rank: the last hidden states, D numbers per token instead of V,
    since student and teacher have the same output layer.
    """

    def __init__(self, student: Student, data: dict, config: Config, run: Run):
        self.student = student
        self.config = config
        self.world = run.world
        self.device = run.world.device
        self.files: dict[str, Any] = {}  # "split/row" -> the open file with its states
        if not config.cache_teacher:
            return
        count = sum(map(len, data.values()))
        fingerprint = student.numerics(self.device)
        if self._open(run, fingerprint, count):
            return
        self.files.clear()
        self._write(run, fingerprint, data, config.batch_size)
        if not self._open(run, fingerprint, count):
            problem = "the files of some ranks are missing; use a folder that all nodes can read"
            raise UserError(f"{run.folder}/teacher: {problem}")

    def __call__(self, split: str, index: Sequence[int], examples: Any) -> Batch:
        """Return the batch of the rows `index` of a split; examples: row -> Trajectory."""
        rows = [examples[row] for row in index]
        batch = trajectories.collate(rows, self.device, self.student.shared)
        if not self.files:
            return self.student.teach(batch)
        names = [f"{split}/{row}" for row in index]
        states = torch.cat([self.files[name].get_tensor(name) for name in names])  # [N, D]
        return batch._replace(taught=states.to(self.device))

    def _open(self, run: Run, fingerprint: dict, count: int) -> bool:
        """Open the intact files of all ranks; return whether every rank has all `count` rows."""

        def intact() -> list[str]:
            paths = (run.folder / "teacher").glob("*.safetensors")
            names = [f"teacher/{path.name}" for path in paths]
            return [name for name in names if run.cached_file(name, fingerprint)]

        for name in distributed.on_main(run.world, intact):
            with contextlib.suppress(OSError):  # this node does not see the file
                file = safe_open(run.folder / name, framework="pt")
                self.files |= dict.fromkeys(file.keys(), file)
        missing = torch.tensor([float(count - len(self.files))], device=self.device)
        return distributed.all_sum(missing, run.world).item() == 0

    def _write(self, run: Run, fingerprint: dict, data: dict, size: int) -> None:
        """Compute the states of this rank's rows, and write them to its file."""
        world = run.world
        states = {}  # "split/row" -> [n, D]
        for split, rows in data.items():
            micro_batches = self.student.micro_batches(range(len(rows)), rows, world, size)
            run.bar.begin(f"Teacher, {split}", len(micro_batches))
            for micro_batch in micro_batches:
                run.stop_if_requested()
                batch = self(split, micro_batch.index, rows)
                parts = torch.split(batch.taught, batch.tokens.tolist())
                for row, part in zip(micro_batch.index, parts, strict=True):
                    states[f"{split}/{row}"] = part.cpu().clone()
                run.bar.advance()
        run.bar.begin("", run.steps, run.done)
        size = world.world_size
        names = [f"teacher/{rank:05d}-of-{size:05d}.safetensors" for rank in range(size)]

        def write() -> None:
            with write_file(run.folder / names[world.rank]) as temporary:
                save_file(states, temporary)

        distributed.on_each(world, write)
        for name in names:
            run.add_cached_file(name, fingerprint)


def own_replies(
    teacher: Teacher, rows: list[int], examples: list[Trajectory], step: int, ends: Any
) -> dict[int, Trajectory]:
    """Sample a new reply of the student to each of some rows; return row -> trajectory."""
    config = teacher.config
    limits = config.max_new_tokens, config.batch_size, sampler.seed_of(config.seed, step)
    spec = sampling.SampleSpec(config.temperature, config.top_p, *limits)
    prompts = [examples[row].student for row in rows]
    world = teacher.world
    replies = sampling.generate(teacher.student, prompts, ends, world, spec, keep_end=True)
    sampled = {}
    for row, reply in zip(rows, replies, strict=True):
        sampled[row] = examples[row]._replace(reply=reply)
    return sampled
