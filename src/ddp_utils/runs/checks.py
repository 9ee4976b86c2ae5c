"""Checks of a training step: losses and gradients are finite, and at step 0 known beforehand."""

import math

import torch

from ddp_utils import NonFiniteError, UserError


def check_step(policy, step, means, per_row, locations, fine_tuning):
    """Before the optimizer moves: losses and gradient are finite, at step 0 where they belong.

    means: of the step; per_row(): the loss of each row of the global batch, found by all ranks.
    Raises NonFiniteError naming the rows; a gradient that overflows in fp16 is no error.
    """
    if step == 0 or not math.isfinite(means["loss"]):
        check_finite(per_row(), locations, step)
    if policy.overflows(means["grad_norm"]):
        return
    if step == 0:
        check_gradients(policy, fine_tuning)
    if not math.isfinite(means["grad_norm"]):
        raise NonFiniteError(f"step {step + 1}: the gradient is not finite; no step was taken")


def check_finite(per_row, locations, step):
    """Name the rows whose loss is NaN or infinite; every rank sees the same table and stops."""
    values = zip(locations, per_row.tolist(), strict=True)
    bad = [location for location, value in values if value - value != 0]
    if bad:
        others = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        raise NonFiniteError(
            f"{', '.join(bad[:3])}{others}: the loss is not finite in step {step + 1}; "
            "no step was taken; a smaller --learning_rate, or remove the rows"
        )


def check_gradients(policy, fine_tuning):
    """Before step 0: what is trained has a finite gradient, what is frozen has none.

    A LoRA's B must move; its A must not, while B is 0. Raises UserError naming the parameter.
    """
    policy.trainable()  # under FSDP, in shares again
    for name, parameter in policy.scorer.model.named_parameters():
        adapter = "lora_" in name
        gradient = parameter.grad
        if parameter.requires_grad:
            gradient = policy.gradient(parameter)
        if not parameter.requires_grad:
            wrong = "is frozen and has a gradient" if gradient is not None else None
        elif fine_tuning == "lora" and not adapter:
            wrong = "belongs to the base model and is not frozen"
        elif gradient is None:
            wrong = "has no gradient"
        elif not bool(torch.isfinite(gradient).all()):
            wrong = "has a gradient that is not finite"
        elif "lora_B" in name and not bool(gradient.any()):
            wrong = "has a gradient of zero: the adapter would not learn"
        else:
            wrong = None
        if wrong:
            raise UserError(f"before the first step: {name} {wrong}")


def noise(dtype, tokens):
    """How far, in nats, two exact scorings of `tokens` tokens [B] may differ by rounding alone.

    fp32: 1e-3 a response. bf16 and fp16 round logits of about 10 to 2^-6; errors of many tokens
    add up like their square root. Measured in bf16 on 20 real and 100 demo pairs on a CPU, alone
    against in a batch: at most 0.2 of this.
    """
    if dtype == torch.float32:
        return torch.full_like(tokens, 1e-3, dtype=torch.float32)
    return 0.05 * tokens.float().sqrt()


def check_reference(now, reference, bound, locations):
    """Step 0: the policy must be its own reference. now, reference [B, 2], bound [B] in nats.

    Raises UserError naming the first pair whose log-probs differ by more.
    """
    gap = (now - reference).abs().amax(-1)  # [B]
    for index in torch.nonzero(~(gap <= bound)).flatten().tolist():
        raise UserError(
            f"{locations[index]}: before the first step the policy's log-prob differs from the "
            f"reference's by {gap[index].item():.3g} nats (at most {bound[index].item():.3g}); "
            "is dropout on, or was the reference scored in another precision?"
        )


def check_first_step(policy, now, reference, tokens, locations, means, expected):
    """Before the first update: the policy is its reference, and the loss has its closed form.

    now, reference: [B, 2] of the global batch's pairs; tokens [B] of the longer side; means: of
    the step; expected: the loss where the policy is its reference, or None.
    Raises UserError saying what differs.
    """
    bound = noise(policy.precision, tokens.to(now.device))
    check_reference(now, reference, bound, locations)
    if expected is None or policy.precision != torch.float32:  # simpo has no closed form
        return
    loss = means.get("loss/preference", means["loss"])
    if abs(loss - expected) > 2e-3 * max(1, expected):
        raise UserError(f"before the first step the loss is {loss:.6f} instead of {expected:.6f}")
