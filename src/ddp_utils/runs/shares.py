"""Checkpoints of which every rank saves its own share."""

import torch

from ddp_utils import distributed
from ddp_utils.data import writing
from ddp_utils.runs import checkpoint


def write_shares(folder, step, tensors, world) -> dict:
    """Write each rank's tensors where checkpoint.write() completes them.

    Return the hash of each file by its name, on all ranks.
    """
    target = checkpoint.path(folder, step)
    temporary = checkpoint.temporary_of(folder, step)
    names = []
    for rank in range(world.world_size):
        share = f"-{rank:05d}-of-{world.world_size:05d}."
        names.append(checkpoint.STATE.replace(".", share))

    def clear():
        with writing(target, temporary):
            temporary.mkdir(parents=True)

    def put():
        with writing(target, temporary, fresh=False):
            return checkpoint.put(temporary / names[world.rank], tensors)

    distributed.on_main(world, clear)
    digest = distributed.on_each(world, put)
    return dict(zip(names, gather_by_rank(digest, world), strict=True))


def gather_by_rank(digest, world) -> list:
    """The sha256, in hexadecimal digits, that each rank has."""
    table = torch.zeros(world.world_size, 32, device=world.device)
    table[world.rank] = torch.tensor([*bytes.fromhex(digest)], dtype=torch.float32)
    return [bytes(row).hex() for row in distributed.all_sum(table, world).byte().tolist()]
