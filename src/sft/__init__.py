"""Supervised fine-tuning data: what train.py alone uses."""
