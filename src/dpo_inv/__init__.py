"""Preference fine-tuning of ProteinMPNN: inverse folding from pairs of sequences."""
