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

from ddp_utils import UserError, distributed, sampler
from ddp_utils.data import write_file
from ddp_utils.run import Run
from lm import logps, sampling
from lm.chat_template import Encoder
from lm.fast.self_test import choose_head_and_layout
from lm.logps import Pair
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
            teacher = batch.teacher_states
            costs = kl_loss.head_divergence(head, student, teacher, batch.divergence)  # [N]
        rows = batch.student.cells[0]
        return (costs.new_zeros(len(batch.tokens)).index_add(0, rows, costs),)

    @torch.no_grad()
    def teach(self, batch: Batch) -> Batch:
        """Return the batch with the states of the prompted base model."""
        with self.model.disable_adapter():
            return batch._replace(teacher_states=self.states(batch.teacher))

    def adapter(self, baked: bool) -> contextlib.AbstractContextManager:
        """Return a context in which the model has its LoRA, or in which it is the base model."""
        return contextlib.nullcontext() if baked else self.model.disable_adapter()

    def example(self, device: torch.device) -> Any:
        row = Trajectory([0], [0], [0], "", "")
        return self.teach(trajectories.collate([row], device, self.shared))


class Teacher:
    """Makes batches that contain the states of the prompted base model.

    The states are computed for each batch. With cache_teacher they are computed once per start and
    stored in the run folder, one file per rank: the last hidden states, D numbers per token instead
    of V, since student and teacher have the same output layer.
    """

    def __init__(
        self, student: Student, data: dict[str, list[Trajectory]], config: Config, run: Run
    ):
        self.student = student
        self.config = config
        self.world = run.world
        self.files: dict[str, Any] = {}  # "split/row" -> the open file with its states
        if config.cache_teacher:
            self._fill_cache(data, run)

    def __call__(self, split: str, index: Sequence[int], examples: Any) -> Batch:
        """Return the batch of the rows `index` of a split; examples: row -> Trajectory."""
        rows = [examples[row] for row in index]
        batch = trajectories.collate(rows, self.world.device, self.student.shared)
        if not self.files:
            return self.student.teach(batch)
        names = [f"{split}/{row}" for row in index]
        states = torch.cat([self.files[name].get_tensor(name) for name in names])  # [N, D]
        return batch._replace(teacher_states=distributed.to_device(states, self.world.device))

    def _fill_cache(self, data: dict[str, list[Trajectory]], run: Run) -> None:
        """Compute the states of this rank's rows, write them, and open the files of all ranks."""
        run.say("computing the hidden states of the teacher")
        states = {}  # "split/row" -> [n, D]
        size = self.config.batch_size
        for split, rows in data.items():
            indices = range(len(rows))
            micro_batches = self.student.micro_batches(indices, rows, self.world, size)
            for micro_batch in run.phase(f"teacher states of {split}").each(micro_batches):
                batch = self(split, micro_batch.index, rows)
                parts = batch.teacher_states.split(batch.tokens.tolist())
                for row, part in zip(micro_batch.index, parts, strict=True):
                    states[f"{split}/{row}"] = part.cpu().clone()
        ranks = range(self.world.world_size)
        paths = [run.folder / f"teacher/{rank}-of-{len(ranks)}.safetensors" for rank in ranks]

        def write() -> None:
            with write_file(paths[self.world.rank]) as temporary:
                save_file(states, temporary)

        distributed.on_each(self.world, write)

        def open_all() -> None:
            for path in paths:
                if not path.exists():
                    raise UserError(f"{path}: not there; use a folder that all nodes can read")
                file = safe_open(path, framework="pt")
                self.files |= dict.fromkeys(file.keys(), file)

        distributed.on_each(self.world, open_all)


def check_targets(model: Any, targets: str) -> None:
    """Raise UserError if a LoRA would train the output layer or the embedding of a model."""
    layers = model.get_output_embeddings(), model.get_input_embeddings()
    for path, module in model.named_modules():
        if module in layers and path.rpartition(".")[2] in targets.split(","):
            problem = "output layer and embedding cannot be trained (the teacher uses them as well)"
            raise UserError(f"--lora_targets: {problem}; leave them out")


def check_head(student: Student, rows: list[Trajectory], config: Config, run: Run) -> None:
    """Test the output layer on real rows, and print what the test says.

    Raises UserError if the output layer cannot be used with a cache.
    """
    pairs = [Pair(row.student, row.reply, row.reply, "", "") for row in rows[:2]]
    for line in choose_head_and_layout(student, pairs, "auto", run.world):
        run.say(line)
    if student.full_logits and config.cache_teacher:
        raise UserError("--cache_teacher: the output layer is not a plain one; leave it out")


def own_replies(
    teacher: Teacher, rows: list[int], examples: list[Trajectory], step: int, encoder: Encoder
) -> dict[int, Trajectory]:
    """Sample a new reply of the student to each of some rows; return row -> trajectory."""
    config = teacher.config
    limits = config.max_new_tokens, config.batch_size, sampler.seed_of(config.seed, step)
    spec = sampling.SampleSpec(1.0, 1.0, *limits)  # the loss is a mean over the student's replies
    prompts = [examples[row].student for row in rows]
    world = teacher.world
    ends = sampling.ends_of(teacher.student, encoder)
    replies = sampling.generate(teacher.student, prompts, ends, world, spec, keep_end=True)
    sampled = {}
    for row, reply in zip(rows, replies, strict=True):
        sampled[row] = examples[row]._replace(reply=reply)
    return sampled
