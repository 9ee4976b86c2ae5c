"""Checks of a training step: losses and gradients are finite, and at step 0 known beforehand."""

import math

import torch

from ddp_utils import NonFiniteError, UserError
from ddp_utils.losses import at_reference, noise


def check_step(policy, step, means, rows, score, fine_tuning):
    """Check, before the optimizer moves, that loss and gradient are finite; at step 0 where it is.

    means: of the step; rows: the global batch, each with its `location`; score(): their log-probs
    or costs as they are now, [rows, S], asked for by all ranks where the loss is not finite.
    Raises NonFiniteError naming the rows. A gradient that overflows in fp16 is no error.
    """
    if not math.isfinite(means["loss"]):
        raise_not_finite(score(), rows, step)
    if policy.overflows(means["grad_norm"]):
        return
    if step == 0:
        check_gradients(policy, fine_tuning)
    if not math.isfinite(means["grad_norm"]):
        raise NonFiniteError(f"step {step + 1}: the gradient is not finite; no step was taken")


def raise_not_finite(scores, rows, step):
    """Raise NonFiniteError naming the rows whose scores [rows, S] are NaN or infinite, if any."""
    bad = []
    for row, is_finite in zip(rows, torch.isfinite(scores).all(-1), strict=True):
        if not is_finite:
            bad.append(row.location)
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    where = f"{', '.join(bad[:3])}{more}: " if bad else ""
    raise NonFiniteError(
        f"{where}the loss is not finite in step {step + 1}; "
        "no step was taken; a smaller --learning_rate, or remove the rows"
    )


def check_gradients(policy, fine_tuning):
    """Check, before step 0, that what is trained has a finite gradient and what is frozen none.

    The B of a LoRA must move; its A must not, while B is 0. Raises UserError naming the parameter.
    """
    policy.trainable()  # under FSDP, in shares again
    for name, parameter in policy.scorer.model.named_parameters():
        gradient = parameter.grad
        if parameter.requires_grad:
            gradient = policy.gradient(parameter)
        problem = None
        if not parameter.requires_grad:
            if gradient is not None:
                problem = "is frozen and has a gradient"
        elif fine_tuning == "lora" and "lora_" not in name:
            problem = "belongs to the base model and is not frozen"
        elif gradient is None:
            problem = "has no gradient"
        elif not bool(torch.isfinite(gradient).all()):
            problem = "has a gradient that is not finite"
        elif "lora_B" in name and not bool(gradient.any()):
            problem = "has a gradient of zero: the adapter would not learn"
        if problem:
            raise UserError(f"before the first step: {name} {problem}")


def check_first_step(policy, means, now, ref_logps, tokens, rows, config):
    """Check, before the first update, that the policy is its reference and the loss is known.

    means: of the training step; now, ref_logps: log-probs [B, 2] of its B rows without dropout;
    tokens: [B], of the longer response; config: of the loss. Raises UserError saying what differs.
    """
    bound = noise(policy.precision, torch.tensor(tokens, device=now.device))  # [B], in nats
    check_reference(now, ref_logps, bound, [row.location for row in rows])
    sides = ("logps/chosen", "logps/rejected")
    trained = torch.tensor([[means[side] for side in sides]], dtype=torch.float64)  # [1, 2]
    expected_mean = ref_logps.double().mean(0, keepdim=True).cpu()
    check_reference(trained, expected_mean, bound.mean()[None].cpu(), ["mean of the batch"])
    expected = at_reference(config)
    if expected is None or policy.precision != torch.float32:  # simpo has no closed form
        return
    loss = means.get("loss/preference", means["loss"])
    if abs(loss - expected) > 2e-3 * max(1, expected):
        raise UserError(f"before the first step the loss is {loss:.6f} instead of {expected:.6f}")


def check_reference(now, ref_logps, bound, locations):
    """Check that the policy is its own reference: now, ref_logps [B, 2], bound [B] in nats.

    Raises UserError naming the first pair whose log-probs differ by more.
    """
    gap = (now - ref_logps).abs().amax(-1)  # [B]
    for index in torch.nonzero(~(gap <= bound)).flatten().tolist():
        raise UserError(
            f"{locations[index]}: before the first step the policy's log-prob differs from the "
            f"reference's by {gap[index].item():.3g} nats (at most {bound[index].item():.3g}); "
            "is dropout on, or was the reference scored in another precision?"
        )
