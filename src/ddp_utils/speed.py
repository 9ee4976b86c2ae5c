"""How fast a step was, and how much of the device's arithmetic it needed."""

import time

import torch
from torch import nn

from ddp_utils.environment import device_name, peak_memory_mb

# FLOP/s with half-precision and with fp32 operands, dense, from the makers' data sheets; of a
# Max 1550 ("PVC") one of its two tiles, which is what Aurora counts as a device
PEAKS = {
    "A100": (312e12, 19.5e12),
    "H100": (989e12, 67e12),
    "H200": (989e12, 67e12),
    "Max 1550": (416e12, 26e12),
}


class Meter:
    """Seconds, tokens and mfu of a step.

    Tokens are those of both texts of a pair, prompt + chosen and prompt + rejected, however few
    of them go through the model: so tokens_per_second compares with other trainers'.

    mfu is the arithmetic that the pairs need at the least, over what the device could have done.
    Needed are 4 FLOP a token and frozen weight (forward, and backward to the input), 6 if it is
    trained; the prompt counts once, the head for responses only; attention is left out.
    """

    def __init__(self, scorer, world):
        backbone, head = scorer.parts()
        embeddings = {m.weight for m in backbone.modules() if isinstance(m, nn.Embedding)}
        # under ZeRO-3 a parameter is empty until it is asked for
        weights = [p for p in backbone.parameters() if p not in embeddings and _axes(p) > 1]
        known = head is not None and not any(_axes(p) > 2 for p in weights)  # no fused experts
        self.peak = known and peak_flops(world.device, scorer.precision)
        self.per_token, self.per_target = (
            sum(getattr(p, "ds_numel", p.numel()) * (6 if p.requires_grad else 4) for p in part)
            for part in (weights, head.parameters() if known else ())
        )
        self.world = world

    def read(self, pairs, seconds) -> dict:
        """The metrics of a step on these pairs, the global batch."""
        values = {
            "seconds": seconds,
            "tokens_per_second": sum(pair.tokens for pair in pairs) / seconds,
            "peak_memory_mb": peak_memory_mb(self.world.device),
        }
        if self.peak:
            needed = sum(
                pair.fed(shared=True) * self.per_token
                + sum(map(len, pair.targets)) * self.per_target
                for pair in pairs
            )
            values["mfu"] = needed / (seconds * self.peak * self.world.world_size)
        return values


def _axes(parameter):
    return len(getattr(parameter, "ds_shape", parameter.shape))


def peak_flops(device, dtype):
    """FLOP/s of a device: the data sheet's; of a CPU what a matrix product reaches; else None."""
    if device.type != "cpu":
        found = [peaks for name, peaks in PEAKS.items() if name in device_name(device)]
        return found[0][dtype == torch.float32] if found else None
    matrix, seconds = torch.ones(1024, 1024, dtype=dtype), []
    for _ in range(4):  # the first one warms up
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(seconds)
