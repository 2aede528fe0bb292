"""Numbers as a person reads them."""

import pytest

from lockstep.quantities import counted, duration, entries, operations, parameters, size


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (size(0), "0 B"),
        (size(999), "999 B"),
        (size(1000), "1 kB"),
        (size(4_194_304), "4.194 MB"),
        (size(999_999_999), "1 GB"),
        (size(1.5e12), "1.5 TB"),
        (operations(312), "312 FLOP"),
        (operations(98_304), "98.3 kFLOP"),
        (operations(1.308e18), "1308 PFLOP"),
        (parameters(115_392), "115.4 k"),
        (parameters(27_800_000), "27.8 M"),
        (parameters(70_553_706_496), "70.55 B"),
        (parameters(1.0084e12), "1.008 T"),
        (parameters(12), "12"),
        (duration(6e-3), "6 ms"),
        (duration(5.8e-5), "58 us"),
        (duration(0.99999), "1 s"),
        (duration(4.1302), "4.13 s"),
        (duration(12345.6), "12,346 s"),
        (counted(1, "micro-batch"), "1 micro-batch"),
        (counted(2, "micro-batch"), "2 micro-batches"),
        (counted(0, "layer"), "0 layers"),
        (entries(1), "1 entry"),
        (entries(0), "0 entries"),
    ],
)
def test_four_figures_and_a_unit(said, expected):
    assert said == expected
