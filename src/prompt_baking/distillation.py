"""A LoRA learns from its own base model, which reads the system prompt that the LoRA does not.

B rows, T tokens, N tokens of all replies, D width, V words.
"""

import contextlib

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ddp_utils import UserError, distributed, logps, sampler, sampling
from ddp_utils.data import write_file
from ddp_utils.fast.self_test import choose_head_and_layout
from ddp_utils.logps import Pair
from prompt_baking import kl_loss, trajectories


class Student(logps.Scorer):
    """What DDP wraps."""

    def forward(self, batch):
        """([B],): what each reply costs, summed over its tokens, in nats."""
        student = self.states(batch.student)  # [N, D]
        with self.autocasting(student.device):
            head = torch.nn.Identity() if self.full_logits else self.backbone_and_head()[1]
            costs = kl_loss.head_divergence(head, student, batch.taught, batch.divergence)  # [N]
        rows = batch.student.cells[0]
        return (costs.new_zeros(len(batch.tokens)).index_add(0, rows, costs),)

    def states(self, batch):
        """The last hidden states that predict the replies [N, D]; of an odd head logits [N, V]."""
        with self.autocasting(batch.ids.device):
            if self.full_logits:
                states = self.model(input_ids=batch.ids, **batch.model_kwargs).logits
            else:
                backbone = self.backbone_and_head()[0]
                output = backbone(input_ids=batch.ids, use_cache=False, **batch.model_kwargs)
                states = output.last_hidden_state
            return states.flatten(0, 1).index_select(0, batch.hidden_index)

    @torch.no_grad()
    def teach(self, batch):
        """The batch with what the prompted base model makes of it."""
        with self.model.disable_adapter():
            return batch._replace(taught=self.states(batch.teacher))

    def example(self, device):
        row = trajectories.Trajectory([0], [0], [0], "", "")
        return self.teach(trajectories.collate([row], device, self.shared))


def check_head(student, rows, world, cache):
    """Test the head on real rows, with the same outcome on every rank; return lines to print."""
    for layer in (student.backbone_and_head()[1], student.unwrap().get_input_embeddings()):
        if layer and any(parameter.requires_grad for parameter in layer.parameters()):
            raise UserError(
                "--lora_targets: leave output layer and embedding to teacher and student"
            )
    pairs = [Pair(row.student, row.reply, row.reply, "", "") for row in rows[:2]]
    lines = choose_head_and_layout(student, pairs, "auto", world)
    if student.full_logits and cache:
        raise UserError("--cache_teacher: the head is not a plain layer; leave it out")
    return lines


def own_replies(student, rows, trajectories, step, ends, config, world):
    """Return row -> its trajectory with a reply that the student samples as it is now."""
    limits = config.max_new_tokens, config.batch_size, sampler.seed_of(config.seed, step)
    spec = sampling.SampleSpec(config.temperature, config.top_p, *limits)
    prompts = [trajectories[row].student for row in rows]
    replies = sampling.generate(student, prompts, ends, world, spec, keep_end=True)
    answered = {}
    for row, reply in zip(rows, replies, strict=True):
        answered[row] = trajectories[row]._replace(reply=reply)
    return answered


class Teacher:
    """Returns the batch of rows with what the prompted base model makes of it.

    Computed whenever it is asked for, or with cache_teacher once: its last hidden states are kept,
    D numbers a token instead of V, since the head, which both share, is frozen. There is one file
    a rank in the run folder, named in its manifest with what the states depend on.
    data: split -> trajectories.
    """

    def __init__(self, student, data, config, run):
        self.student = student
        self.data = data
        self.device = run.world.device
        self.files = {}  # "split/row" -> the open file that has its states
        if not config.cache_teacher:
            return
        fingerprint = student.numerics(self.device)
        if not self._open(run, fingerprint):
            self._write(run, fingerprint, config.batch_size)
            if not self._open(run, fingerprint):
                raise UserError(
                    f"{run.folder}/teacher: not all ranks' files are here; "
                    "the run folder must be on a disk that all nodes share"
                )
            run.bar.begin("", run.steps, run.done)

    def __call__(self, split, index, sampled=None):
        rows = [(sampled or self.data[split])[row] for row in index]
        batch = trajectories.collate(rows, self.device, self.student.shared)
        if not self.files:
            return self.student.teach(batch)
        names = [f"{split}/{row}" for row in index]
        states = torch.cat([self.files[name].get_tensor(name) for name in names])  # [N, D]
        return batch._replace(taught=states.to(self.device))

    def _open(self, run, fingerprint):
        """Open the files of all ranks; return whether each rank has all rows."""

        def intact():
            files = (run.folder / "teacher").glob("*.safetensors")
            names = [f"teacher/{file.name}" for file in files]
            return [name for name in names if run.cached_file(name, fingerprint)]

        for name in distributed.on_main(run.world, intact):
            with contextlib.suppress(OSError):  # not on this node
                file = safe_open(run.folder / name, framework="pt")
                self.files |= dict.fromkeys(file.keys(), file)
        missing = sum(map(len, self.data.values())) - len(self.files)
        missing = torch.tensor([float(missing)], device=self.device)
        return distributed.all_sum(missing, run.world).item() == 0

    def _write(self, run, fingerprint, size):
        """Compute this rank's share of the states and write them into its file."""
        self.files.clear()
        world = run.world
        states = {}  # "split/row" -> [n, D]
        for split, rows in self.data.items():
            micro_batches = self.student.micro_batches(range(len(rows)), rows, world, size)
            run.bar.begin(f"Teacher, {split}", len(micro_batches))
            for micro_batch in micro_batches:
                run.stop_if_requested()
                batch = self(split, micro_batch.index)
                parts = batch.taught.split(batch.tokens.tolist())
                for row, part in zip(micro_batch.index, parts, strict=True):
                    states[f"{split}/{row}"] = part.cpu().clone()
                run.bar.advance()
        name = f"{world.rank:05d}-of-{world.world_size:05d}.safetensors"

        def write():
            with write_file(run.folder / "teacher" / name) as temporary:
                save_file(states, temporary)

        distributed.on_each(world, write)
        for rank in range(world.world_size):
            name = f"teacher/{rank:05d}-of-{world.world_size:05d}.safetensors"
            run.add_cached_file(name, fingerprint)
