"""Weights of a ProteinMPNN and directions to look along, drawn by a rule: no file has to hold them.

NumPy promises that RandomState draws the same numbers for ever. make_mpnn.py fills the official
model by this rule, and test_mpnn_official.py ours; smollm2.py draws an adapter.
"""

import math
import zlib

import numpy as np
import torch


def draw(name, shape, seed):
    """Return numbers between -1 and 1 that depend on the name, the shape and the seed alone."""
    dice = np.random.RandomState([seed, zlib.crc32(name.encode())])
    return torch.from_numpy(dice.uniform(-1, 1, shape)).float()


def fill(model, seed):
    """Give each parameter values of its name and this seed; gains and biases are not 1 and 0."""
    for name, parameter in model.named_parameters():
        values = draw(name, parameter.shape, seed)
        if parameter.dim() > 1:
            values *= math.sqrt(6 / sum(parameter.shape))  # Xavier's bound
        else:
            values = 0.35 * values + ("norm" in name and name.endswith("weight"))
        parameter.data.copy_(values)
    return model


def along(name, gradient):
    """Two products of a gradient with directions whose entries have mean 0 and variance 1."""
    products = []
    for number in (1, 2):
        direction = math.sqrt(3) * draw(f"{name} {number}", gradient.shape, 0)
        products.append((gradient.double() * direction.double()).sum().item())
    return products
