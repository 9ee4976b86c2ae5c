"""What limit.py counts, by hand."""

import time

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench import limit


def test_the_products_of_a_linear_layer_and_of_causal_attention():
    inputs = torch.randn(5, 3, requires_grad=True)
    weight = torch.randn(4, 3, requires_grad=True)
    query, key, value = torch.randn(3, 1, 2, 6, 8).requires_grad_()
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    for how in ({"is_causal": True}, {"attn_mask": mask}):
        with limit.Products() as products:
            (inputs @ weight.T).sum().backward()
            scaled_dot_product_attention(query, key, value, **how).sum().backward()
        linear = 3 * 2 * 5 * 3 * 4  # forward, both gradients; two for each of 5 x 3 x 4
        attention = 6 * 2 * 2 * 21 * 8  # 2 + 4 products; 2 heads, 21 pairs of tokens, 8 wide
        assert limit.flops(products.found()) == pytest.approx(linear + attention)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_limit_of_products_is_their_time(one_thread):
    left, right = torch.randn(2, 700, 700)
    left @ right
    with limit.Products() as products:
        for _ in range(5):
            left @ right
    start = time.process_time()
    for _ in range(5):
        left @ right
    took = time.process_time() - start
    assert 0.3 < limit.seconds(products.found()) / took < 3
