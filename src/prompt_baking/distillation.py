"""The student with the LoRA, and its teacher: the same model without the LoRA, which is prompted.

B rows, T tokens, N tokens of all replies, D width, V vocabulary size.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
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
        with self.adapter(baked=False):
            return batch._replace(teacher_states=self.states(batch.teacher))

    def batch(self, rows: Sequence[Trajectory], device: torch.device) -> Batch:
        """Return the batch of these rows, with the states of the prompted base model."""
        return self.teach(trajectories.collate(rows, device, self.shared))

    @functools.cached_property
    def lora_layers(self) -> list[BaseTunerLayer]:
        """Return the layers with a LoRA."""
        return [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]

    @contextlib.contextmanager
    def adapter(self, baked: bool) -> Iterator[None]:
        """Let the model have its LoRA, or be the base model.

        peft's disable_adapter() also walks all modules for a report: 54 ms for 28 layers. This
        takes 1 ms.
        """
        before = [layer._disable_adapters for layer in self.lora_layers]
        try:
            for layer in self.lora_layers:
                layer._disable_adapters = not baked
            yield
        finally:
            for layer, was in zip(self.lora_layers, before, strict=True):
                layer._disable_adapters = was

    def example(self, device: torch.device) -> Any:
        return self.batch([Trajectory([0], [0], [0], "", "")], device)


def check_targets(model: Any, targets: str) -> None:
    """Raise UserError if a LoRA would train the output layer or the embedding of a model."""
    layers = model.get_output_embeddings(), model.get_input_embeddings()
    names = [name.strip() for name in targets.split(",")]
    for path, module in model.named_modules():
        if module in layers and path.rpartition(".")[2] in names:
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
        available = config.max_traj_len - len(examples[row].teacher)  # as of replies in files
        sampled[row] = examples[row]._replace(reply=reply[:available])
    return sampled
