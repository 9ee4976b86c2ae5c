"""A LoRA learns from its own base model, which reads the system prompt that the LoRA does not.

B rows, T tokens, N tokens of all replies, D width, V words.
"""

import contextlib
import shutil

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ddp_utils import UserError, distributed, fast, files, logps, sampler
from ddp_utils.encoder import Pair
from ddp_utils.runs import checks
from prompt_baking import kl_loss, trajectories


class Student(logps.Scorer):
    """What DDP wraps. objective: "kl", or "sft" for the sampled tokens alone."""

    objective = "kl"

    def forward(self, batch):
        """([B],): what each reply costs, summed over its tokens, in nats."""
        student = self.states(batch.ids, batch.where)  # [N, D]
        with torch.autocast(batch.ids.device.type, self.autocast, enabled=bool(self.autocast)):
            head = torch.nn.Identity() if self.own_head else self.parts()[1]
            if self.objective == "kl":
                costs = kl_loss.head_kl(head, student, batch.taught)  # [N]
            else:
                costs = -logps.head_logps(head, student, batch.targets)
        return (costs.new_zeros(len(batch.tokens)).index_add(0, batch.rows, costs),)

    def states(self, ids, where):
        """The last hidden states that predict the replies [N, D]; of an odd head logits [N, V]."""
        with torch.autocast(ids.device.type, self.autocast, enabled=bool(self.autocast)):
            if self.own_head:
                found = self.model(input_ids=ids).logits
            else:
                found = self.parts()[0](input_ids=ids, use_cache=False).last_hidden_state
            return found.flatten(0, 1)[where]

    @torch.no_grad()
    def teach(self, batch):
        """The batch with what the prompted base model makes of it."""
        with self.model.disable_adapter():
            return batch._replace(taught=self.states(*batch.prompted))

    @torch.no_grad()
    def base_costs(self, batch):
        """What forward gives without the LoRA."""
        with self.model.disable_adapter():
            return self(batch)[0]

    def example(self, device):
        row = trajectories.Trajectory([0], [0], [0], "", "")
        return self.teach(trajectories.collate([row], device))


def check_head(student, rows, world, cache):
    """The head on real rows; on every rank the same answer. Returns lines to tell."""
    shared = [student.parts()[1], student.bare().get_input_embeddings()]
    if any(p.requires_grad for layer in shared if layer for p in layer.parameters()):
        raise UserError("--lora_targets: leave output layer and embedding to teacher and student")
    pairs = [Pair(row.student, row.reply, row.reply, "", "") for row in rows[:2]]
    line = fast.check_head(student, pairs, world.device)
    doubt = torch.tensor([float(student.own_head)], device=world.device)
    student.own_head = distributed.all_sum(doubt, world).item() > 0
    if student.own_head and cache:
        raise UserError(f"--cache_teacher: {line or 'the head is not a plain layer'}; leave it out")
    return [line] if line else []


def check_first_step(costs, expected, rows, precision):
    """Before the first update a fresh LoRA changes nothing: costs are those of the base model.

    costs, expected: [B] of the global batch's rows. Raises UserError naming the first that differs.
    """
    tokens = torch.tensor([len(row.reply) for row in rows])
    bound = checks.noise(precision, tokens).tolist()
    for row, gap, most in zip(rows, (costs - expected).abs().tolist(), bound, strict=True):
        if not gap <= most:
            raise UserError(
                f"{row.where}: before the first step the model with its LoRA differs from the base "
                f"model by {gap:.3g} nats (at most {most:.3g}); is an adapter part of it already?"
            )


class Teacher:
    """teacher(split, rows) -> Batch with what it makes of them. data: split -> trajectories.

    Computed whenever it is asked for, or with cache_teacher once: kept are its last hidden states,
    D numbers a token instead of V, since the head, which both share, is frozen. One file a rank in
    the run folder, named in its manifest with what they depend on.
    """

    def __init__(self, student, data, config, run):
        self.student, self.data, self.device = student, data, run.world.device
        self.kept = {}  # "split/row" -> the open file that has it
        if config.cache_teacher:
            fingerprint = logps.fingerprint(student, data, [config.model_name], self.device)
            self._open(run, fingerprint)
            known = torch.tensor([float(self._complete())], device=self.device)
            if distributed.all_sum(known, run.world).item() < run.world.world_size:
                self._write(run, fingerprint, config.batch_size)
                self._open(run, fingerprint)
                if not self._complete():
                    raise UserError(
                        f"{run.folder}/teacher: not all ranks' files are here; "
                        "the run folder must be on a disk that all nodes share"
                    )
                run.bar.of_run(run.steps, run.done)

    def __call__(self, split, index, teach=True):
        batch = trajectories.collate([self.data[split][row] for row in index], self.device)
        if not teach:
            return batch
        if not self.kept:
            return self.student.teach(batch)
        names = [f"{split}/{row}" for row in index]
        states = torch.cat([self.kept[name].get_tensor(name) for name in names])  # [N, D]
        return batch._replace(taught=states.to(self.device))

    def _complete(self):
        rows = {f"{split}/{row}" for split, rows in self.data.items() for row in range(len(rows))}
        return rows <= self.kept.keys()

    def _open(self, run, fingerprint):
        def whole():
            names = [name for name in run.cached_files if name.startswith("teacher/")]
            return [name for name in names if run.cached_file(name, fingerprint)]

        for name in distributed.on_main(run.world, whole):
            with contextlib.suppress(OSError):  # not on this node: see __init__
                file = safe_open(run.folder / name, framework="pt")
                self.kept |= dict.fromkeys(file.keys(), file)

    def _write(self, run, fingerprint, size):
        self.kept, found, world = {}, {}, run.world
        folder = run.folder / "teacher"
        folder.mkdir(exist_ok=True)
        for split, rows in self.data.items():
            lengths = {row: trajectory.row for row, trajectory in enumerate(rows)}
            parts = sampler.share(range(len(rows)), lengths, world, size, padded=True)
            run.bar.begin(f"Teacher, {split}", len(parts))
            for part in parts:
                run.stop_if_requested()
                batch = self(split, part.index)
                states = batch.taught.split(batch.tokens.tolist())  # [n, D] of each row
                for row, mine in zip(part.index, states, strict=True):
                    found[f"{split}/{row}"] = mine.cpu().clone()
                run.bar.advance()
        names = []
        for rank in range(world.world_size):
            names.append(f"{rank:05d}-of-{world.world_size:05d}.safetensors")
        path = folder / names[world.rank]
        with files.replacing(path) as temporary:
            save_file(found, temporary)
            shutil.copymode(run.folder / "config.json", temporary)
        digests = distributed.gather_by_rank(files.sha256(path), world)
        for name, digest in zip(names, digests, strict=True):
            run.add_cached_file(f"teacher/{name}", fingerprint, digest)
