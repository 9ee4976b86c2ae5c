"""The student with the LoRA, and its teacher: the same model without the LoRA, which is prompted.

B rows, T tokens, N tokens of all replies, D width, V vocabulary size.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_utils import UserError, sampler
from ddp_utils.distributed import World
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

    def batch(self, rows: Sequence[Trajectory], device: torch.device) -> Batch:
        """Return the batch of these rows, with the states of the prompted base model."""
        return self.teach(trajectories.collate(rows, device, self.shared))

    def adapter(self, baked: bool) -> contextlib.AbstractContextManager:
        """Return a context in which the model has its LoRA, or in which it is the base model."""
        return contextlib.nullcontext() if baked else self.model.disable_adapter()

    def example(self, device: torch.device) -> Any:
        return self.batch([Trajectory([0], [0], [0], "", "")], device)


def check_targets(model: Any, targets: str) -> None:
    """Raise UserError if a LoRA would train the output layer or the embedding of a model."""
    layers = model.get_output_embeddings(), model.get_input_embeddings()
    for path, module in model.named_modules():
        if module in layers and path.rpartition(".")[2] in targets.split(","):
            problem = "output layer and embedding cannot be trained (the teacher uses them as well)"
            raise UserError(f"--lora_targets: {problem}; leave them out")


def check_head(student: Student, rows: list[Trajectory], run: Run) -> None:
    """Test the output layer on real rows, and print the result."""
    pairs = [Pair(row.student, row.reply, row.reply, "", "") for row in rows[:2]]
    for line in choose_head_and_layout(student, pairs, "auto", run.world):
        run.say(line)


def own_replies(
    student: Student,
    rows: list[int],
    examples: list[Trajectory],
    step: int,
    encoder: Encoder,
    config: Config,
    world: World,
) -> dict[int, Trajectory]:
    """Sample a new reply of the student to each of some rows; return row -> trajectory."""
    limits = config.max_new_tokens, config.batch_size, sampler.seed_of(config.seed, step)
    spec = sampling.SampleSpec(1.0, 1.0, *limits)  # the loss is a mean over the student's replies
    prompts = [examples[row].student for row in rows]
    ends = sampling.ends_of(student, encoder)
    replies = sampling.generate(student, prompts, ends, world, spec, keep_end=True)
    sampled = {}
    for row, reply in zip(rows, replies, strict=True):
        sampled[row] = examples[row]._replace(reply=reply)
    return sampled
