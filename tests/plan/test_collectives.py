"""Collectives against measured nccl-tests and against what must hold for any description."""

import csv
from pathlib import Path

import numpy as np
import pytest

from lockstep.plan import Coefficients, load_cluster
from lockstep.plan.collectives import all_gather, all_reduce, all_to_all, transfer

ORACLES = Path(__file__).parents[1] / "oracles"
ONE = Coefficients()


def measured(name):
    with (ORACLES / name).open() as file:
        rows = list(csv.reader(file))[1:]
    return np.array([float(row[0]) for row in rows]), np.array([float(row[3]) * 1e-9 for row in rows])


@pytest.mark.parametrize(
    ("file", "cluster", "ranks"),
    [
        ("allreduce_a100_2gpu.csv", "8xA100-80", 2),
        ("allreduce_a100_4gpu.csv", "8xA100-80", 4),
        ("allreduce_a100_8gpu.csv", "8xA100-80", 8),
        ("allreduce_v100_8gpu.csv", "8xV100", 8),
    ],
)
def test_measured_all_reduce(file, cluster, ranks):
    sizes, seconds = measured(file)
    found = all_reduce(sizes, np.full(len(sizes), float(ranks)), 1.0, load_cluster(cluster), ONE)
    # Latency and bandwidth of one description for 2, 4 and 8 devices; the measurements scatter by about 2 %.
    assert np.abs(found / seconds - 1).mean() < 0.06


def test_one_rank_costs_nothing():
    cluster, one = load_cluster("64xH100"), np.ones(1)
    for collective in (all_reduce, all_gather, all_to_all):
        assert collective(1e9, one, 1.0, cluster, ONE)[0] == 0


def test_gather_is_half_of_reduce():
    cluster, ranks = load_cluster("64xH100"), np.array([64.0])
    both = all_reduce(1e12, ranks, 1.0, cluster, ONE)
    assert all_gather(1e12, ranks, 1.0, cluster, ONE)[0] == pytest.approx(both[0] / 2, rel=1e-3)  # latency counts once


def test_groups_that_leave_the_node_share_its_links():
    cluster = load_cluster("64xH100")
    ranks = np.array([8.0])
    inside, across = (all_reduce(1e9, ranks, stride, cluster, ONE)[0] for stride in (1.0, 8.0))
    assert across / inside == pytest.approx(360 / 45, rel=0.02)  # latencies differ
    # 64 ranks from stride 1: the node's 8 links carry an eighth of the data each.
    assert all_reduce(1e9, np.array([64.0]), 1.0, cluster, ONE)[0] < 0.5 * across


def test_transfer_by_distance():
    near, far = transfer(1e9, np.array([1.0, 8.0]), load_cluster("64xH100"), ONE)
    assert far / near == pytest.approx(360 / 45, rel=0.02)


def test_coefficients_scale_time():
    cluster, ranks = load_cluster("64xH100"), np.array([16.0])
    slow = Coefficients(network_bandwidth=0.5)
    assert all_reduce(1e9, ranks, 8.0, cluster, slow)[0] > 1.9 * all_reduce(1e9, ranks, 8.0, cluster, ONE)[0]
