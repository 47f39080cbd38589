"""The 2:4 copy of a file keeps the two largest of every four codes along the input channels."""

import itertools

import numpy as np

from analysis.gpu_tradeoff.run import two_of_four


def test_the_two_largest_of_four_neighbours_stay():
    codes = np.random.default_rng(0).integers(-128, 128, (3, 8, 2, 1)).astype(np.int8)
    found = two_of_four(codes)
    for o, first, y in itertools.product(range(3), (0, 4), range(2)):
        four, kept = codes[o, first : first + 4, y, 0], found[o, first : first + 4, y, 0]
        assert set(kept) <= {0, *four}
        assert np.abs(kept.astype(int)).sum() == np.sort(np.abs(four.astype(int)))[2:].sum()
        assert ((kept == four) | (kept == 0)).all()
