"""A step of baking against the plain one: baking_plain.py, whose whole table is printed by hand."""

import statistics

import pytest

from bench import baking_plain

BAR = 1.8 * 0.8  # where others compute beside this


@pytest.mark.show
def test_with_a_long_prompt_a_step_takes_less_cpu():
    ratios, memory = baking_plain.compare("long x0", turns=1)
    print(ratios, memory)
    assert statistics.median(ratios) >= BAR


@pytest.mark.show
def test_with_many_words_it_takes_half_the_memory():
    _, ((plain, ours),) = baking_plain.compare("51k words", turns=1)
    assert plain >= 2 * ours
