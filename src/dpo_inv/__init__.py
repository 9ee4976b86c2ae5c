"""Preference fine-tuning of ProteinMPNN: inverse folding from pairs of sequences."""

import ddp_utils.runs.startup  # noqa: F401  before torch, whose import takes seconds
