"""How much memory a rank will hold, and what it sends: dryrun.py says what a process needs that
shards nothing; how each strategy shares that out is arithmetic. Sizes are in bytes.
"""

from typing import NamedTuple

STRATEGIES = ("DDP", "FSDP SHARD_GRAD_OP", "FSDP FULL_SHARD", "FSDP HYBRID_SHARD")
STRATEGIES += ("ZeRO-1", "ZeRO-2", "ZeRO-3")
STRATEGIES += ("ZeRO-2 offload", "FSDP FULL_SHARD offload", "ZeRO-3 offload")
BUCKET = 5e8  # numbers that DeepSpeed reduces at a time, unless its JSON says else
SENT = 2 * 250 * 2**20  # what DDP packs at a time of rank 0's weights, before the first step
PREFETCH, NEAR = 5e7, 1e9  # that ZeRO-3 gathers ahead, and leaves gathered for what comes soon


class Share(NamedTuple):
    """What one rank holds when it holds the most, and what it sends in a step."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # and all else that comes and goes
    host: float  # of it, in the host's memory
    sent: float

    @property
    def device(self):
        return sum(self[:4])


def share(need, strategy, ranks, nodes=1, turns=1, bucket=BUCKET) -> Share:
    """What each of `ranks` holds of it. turns: micro-batches of a step.

    strategy: one of STRATEGIES. "offload": what is sharded is on the host; of ZeRO-2, what AdamW
    needs.
    """
    n, (tool, *kind) = need, strategy.replace("-", " ").split()
    offload, kind = "offload" in kind, "".join(kind[:1])
    keeps = kind == "SHARD_GRAD_OP"
    parts = ranks // nodes if kind == "HYBRID_SHARD" else ranks
    part, others = 1 / parts, (parts - 1) / parts  # others: how much of a tensor is elsewhere
    every, two = n.root + n.layers, n.root + 2 * n.layer
    learns, own = n.gradients * n.width / 4, n.root_gradients * n.width / 4
    weights, optimizer, sums = n.weights, n.moments, n.gradients * part
    forward, head, backward, bottom, step = n[-5:]
    if tool != "DDP":  # no copies: the weights themselves are gathered in autocast's dtype
        forward, head, backward = (peak - n.copies for peak in (forward, head, backward))
    if tool == "DDP":
        held = n.gradients if ranks > 1 else 0  # its buckets stay
        weights -= n.table if ranks == 1 else 0  # several ranks send each other all weights
        bottom = bottom if held else max(0, bottom - n.root_gradients)  # that is the gradient
        phases = [(0, held, max(forward, head)), (0, max(held, n.root_gradients), backward)]
        phases += [(0, n.gradients, max(bottom, step))]
        phases += [(0, 0, min(weights, SENT) - optimizer)] if ranks > 1 else []
        sent = 2 * others * n.gradients
    elif tool == "FSDP":
        weights, optimizer = n.weights * part, n.moments * part
        # a layer is gathered in one buffer, and copied out of it, while another one computes
        gathered = every + n.layer if keeps else two
        comes = own + max(n.layer, n.layer_gradients)  # the root's gradients wait for the end
        done = 0 if offload else sums - n.root_gradients * part
        phases = [(n.root + two, 0, 0), (gathered, 0, max(forward, head))]
        phases += [(gathered, comes, backward), (two, comes + done, 0)]
        phases += [(n.root, own + done, max(bottom, n.root_gradients))]
        phases += [] if offload else [(0, sums, step * part)]
        across = 2 * (nodes - 1) / nodes * sums if parts < ranks else 0
        sent = turns * (others * ((2 - keeps) * n.layers + n.root + n.gradients) + across)
    else:
        optimizer = (n.gradients + n.moments) * part  # its own fp32 weights, too
        bucket, grads = bucket * n.width, 0 if offload else learns * part
        if kind == "3":
            weights, soon = every * part, min(PREFETCH * n.width, every * others)
            gathered = min(every, max(NEAR * n.width, two))
            phases = [(gathered + soon, grads + bucket, forward)]
            phases += [(gathered, grads + bucket, max(head, backward, bottom))]
        else:
            weights, bucket = every, 2 * bucket  # one fills while the other is sent
            phases = [(0, bucket + own, max(forward, head, backward))]
            phases += [(0, bucket + (learns if kind == "1" else grads), bottom)]
        phases += [] if offload else [(0, grads, 3 * sums)]  # in fp32, and AdamW's own
        sent = others * (learns * (1 if kind == "1" else turns))
        sent += others * (turns * 2 * every if kind == "3" else learns)
    host = 0
    if offload:
        host, optimizer = optimizer + sums, 0
        if kind != "2":
            host, weights = host + weights, 0
    peak = max(phases, key=sum)
    return Share(weights + peak[0], peak[1], optimizer, peak[2], host, sent)


def name_of(strategy) -> str:
    """An optim.Strategy, as in STRATEGIES."""
    offload = getattr(strategy.options, "offload", False)  # of FSDP
    if strategy.kind == "deepspeed":
        optimizer = strategy.options["zero_optimization"].get("offload_optimizer", {})
        offload = optimizer.get("device") == "cpu"
    return strategy.name + " offload" * offload
