"""Policies that shard weights, gradients or optimizer states, and their JSON settings."""
