"""What bench/limit.py counts, by hand."""

import pytest
import torch
from torch.nn import functional

from bench import limit

LINEAR = 2 * 5 * 3 * 4  # [5, 3] by [3, 4]: a multiplication and an addition for each


@pytest.mark.parametrize("how", ["is_causal", "attn_mask"])
def test_the_products_of_layers_and_of_causal_attention(how):
    inputs = torch.randn(5, 3, requires_grad=True)
    weight = torch.randn(4, 3, requires_grad=True)
    many = torch.randn(7, 5, 3, requires_grad=True)
    query, key, value = torch.randn(3, 1, 2, 6, 8).requires_grad_()
    mask = {"is_causal": True, "attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()}[how]
    with limit.Products() as products:
        functional.linear(inputs, weight, torch.zeros(4)).sum().backward()  # addmm, two mm
        (many @ torch.randn(7, 3, 4)).sum().backward()  # bmm, and one for the inputs
        functional.scaled_dot_product_attention(query, key, value, **{how: mask}).sum().backward()
    attention = 6 * 2 * 2 * 21 * 8  # 2 + 4 products; 2 heads, 21 pairs of tokens, 8 wide
    wanted = 3 * LINEAR + 2 * 7 * LINEAR + attention
    assert limit.flops(products.as_list()) == pytest.approx(wanted)
    assert 0 < limit.seconds(products.as_list()) < 10  # gradients of a sum have strides of 0
