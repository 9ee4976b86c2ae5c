"""A LoRA learns from its own base model, which reads the system prompt that the LoRA does not.

B rows, T tokens, N tokens of all replies, D width, V words.
"""

import contextlib
import shutil

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ddp_utils import UserError, distributed, fast, files, logps
from ddp_utils.encoder import Pair
from ddp_utils.runs import checks
from prompt_baking import kl_loss, trajectories


class Student(logps.Scorer):
    """What DDP wraps. objective: "kl", or "sft" for the sampled tokens alone."""

    objective = "kl"

    def forward(self, batch):
        """([B],): what each reply costs, summed over its tokens, in nats."""
        student = self.states(batch.student)  # [N, D]
        with self.autocasting(student):
            head = torch.nn.Identity() if self.own_head else self.parts()[1]
            if self.objective == "kl":
                costs = kl_loss.head_kl(head, student, batch.taught)  # [N]
            else:
                costs = -logps.head_logps(head, student, batch.student.targets)
        rows = batch.student.cells[0]
        return (costs.new_zeros(len(batch.tokens)).index_add(0, rows, costs),)

    def autocasting(self, tensor):
        return torch.autocast(tensor.device.type, self.autocast, enabled=bool(self.autocast))

    def states(self, batch):
        """The last hidden states that predict the replies [N, D]; of an odd head logits [N, V]."""
        with self.autocasting(batch.ids):
            if self.own_head:
                states = self.model(input_ids=batch.ids).logits
            else:
                states = self.parts()[0](input_ids=batch.ids, use_cache=False).last_hidden_state
            return states.flatten(0, 1)[batch.where]

    @torch.no_grad()
    def teach(self, batch):
        """The batch with what the prompted base model makes of it."""
        with self.model.disable_adapter():
            return batch._replace(taught=self.states(batch.teacher))

    @torch.no_grad()
    def base_costs(self, batch):
        """What forward gives without the LoRA."""
        with self.model.disable_adapter():
            return self(batch)[0]

    def example(self, device):
        row = trajectories.Trajectory([0], [0], [0], "", "")
        return self.teach(trajectories.collate([row], device))


def check_head(student, rows, world, cache):
    """Test the head on real rows, with the same outcome on every rank; return lines to print."""
    for layer in (student.parts()[1], student.bare().get_input_embeddings()):
        if layer and any(parameter.requires_grad for parameter in layer.parameters()):
            raise UserError(
                "--lora_targets: leave output layer and embedding to teacher and student"
            )
    pairs = [Pair(row.student, row.reply, row.reply, "", "") for row in rows[:2]]
    line = fast.check_head(student, pairs, world.device)
    doubt = torch.tensor([float(student.own_head)], device=world.device)
    student.own_head = distributed.all_sum(doubt, world).item() > 0
    if student.own_head and cache:
        raise UserError(f"--cache_teacher: {line or 'the head is not a plain layer'}; leave it out")
    return [line] if line else []


def check_first_step(costs, expected, rows, precision):
    """Raise UserError unless costs [B] of a fresh LoRA are those of the base model, `expected`."""
    tokens = torch.tensor([len(row.reply) for row in rows])
    bound = checks.noise(precision, tokens).tolist()
    for row, gap, most in zip(rows, (costs - expected).abs().tolist(), bound, strict=True):
        if not gap <= most:
            raise UserError(
                f"{row.where}: before the first step the model with its LoRA differs from the base "
                f"model by {gap:.3g} nats (at most {most:.3g}); is an adapter part of it already?"
            )


class Teacher:
    """Returns the batch of rows with what the prompted base model makes of it.

    Computed whenever it is asked for, or with cache_teacher once: its last hidden states are kept,
    D numbers a token instead of V, since the head, which both share, is frozen. There is one file
    a rank in the run folder, named in its manifest with what they depend on.
    data: split -> trajectories.
    """

    def __init__(self, student, data, config, run):
        self.student = student
        self.data = data
        self.device = run.world.device
        self.files = {}  # "split/row" -> the open file that has its states
        if not config.cache_teacher:
            return
        fingerprint = logps.fingerprint(student, data, [config.model_name], self.device)
        if not self._open(run, fingerprint):
            self._write(run, fingerprint, config.batch_size)
            if not self._open(run, fingerprint):
                raise UserError(
                    f"{run.folder}/teacher: not all ranks' files are here; "
                    "the run folder must be on a disk that all nodes share"
                )
            run.bar.of_run(run.steps, run.done)

    def __call__(self, split, index, teach=True):
        batch = trajectories.collate([self.data[split][row] for row in index], self.device)
        if not teach:
            return batch
        if not self.files:
            return self.student.teach(batch)
        names = [f"{split}/{row}" for row in index]
        states = torch.cat([self.files[name].get_tensor(name) for name in names])  # [N, D]
        return batch._replace(taught=states.to(self.device))

    def _open(self, run, fingerprint):
        """Open the files of all ranks; return whether each rank has all rows."""

        def intact():
            names = [name for name in run.cached_files if name.startswith("teacher/")]
            return [name for name in names if run.cached_file(name, fingerprint)]

        for name in distributed.on_main(run.world, intact):
            with contextlib.suppress(OSError):  # not on this node
                file = safe_open(run.folder / name, framework="pt")
                self.files |= dict.fromkeys(file.keys(), file)
        missing = sum(map(len, self.data.values())) - len(self.files)
        missing = torch.tensor([float(missing)], device=self.device)
        return distributed.all_sum(missing, run.world).item() == 0

    def _write(self, run, fingerprint, size):
        self.files.clear()
        world = run.world
        folder = run.folder / "teacher"
        folder.mkdir(exist_ok=True)
        states = {}  # "split/row" -> [n, D]
        for split, rows in self.data.items():
            micro_batches = trajectories.share(range(len(rows)), rows, size, world)
            run.bar.begin(f"Teacher, {split}", len(micro_batches))
            for micro_batch in micro_batches:
                run.stop_if_requested()
                batch = self(split, micro_batch.index)
                parts = batch.taught.split(batch.tokens.tolist())
                for row, part in zip(micro_batch.index, parts, strict=True):
                    states[f"{split}/{row}"] = part.cpu().clone()
                run.bar.advance()
        name = f"{{:05d}}-of-{world.world_size:05d}.safetensors"
        path = folder / name.format(world.rank)
        with files.replacing(path) as temporary:
            save_file(states, temporary)
            shutil.copymode(run.folder / "config.json", temporary)
        from ddp_utils.runs.shares import gather_by_rank

        for rank, digest in enumerate(gather_by_rank(files.sha256(path), world)):
            run.add_cached_file(f"teacher/{name.format(rank)}", fingerprint, digest)
