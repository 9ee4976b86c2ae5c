"""Policies that shard weights, gradients or optimizer states; imported where a Strategy asks."""
