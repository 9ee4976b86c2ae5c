"""Preference fine-tuning of ProteinMPNN: inverse folding from pairs of sequences."""

import ddp_utils.runs.preemption  # noqa: F401  before torch, whose import takes seconds
