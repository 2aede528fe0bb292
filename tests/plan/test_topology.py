"""What a switch, a mesh and a ring leave of a level's bandwidth, counted by hand."""

import numpy as np
import pytest

from lockstep.errors import LockstepError
from lockstep.plan import Coefficients, load_cluster
from lockstep.plan.collectives import all_gather, all_reduce, all_to_all, transfer

ONE, SIZE = Coefficients(), 1e12  # so large that latencies do not count
RANKS = np.array([2.0, 4.0, 8.0])


def node(topology):
    return load_cluster("8xH100").with_level("node", topology=topology)


def slower(call, topology, *where):
    """How many times as long as through a switch."""
    through = (call(SIZE, *where, node(kind), ONE) for kind in (topology, "switch"))
    return np.divide(*through).round(3).tolist()


def test_a_mesh_has_links_to_the_groups_own_members_only():
    for call in (all_reduce, all_gather, all_to_all):
        assert slower(call, "mesh", RANKS, 1.0) == [7.0, round(7 / 3, 3), 1.0]
    assert slower(transfer, "mesh", np.array([1.0, 4.0])) == [7.0, 7.0]


def test_a_ring_of_all_devices_is_used_whole_by_ring_collectives():
    # Two or four of eight have no way round: they come back the way they went.
    assert slower(all_reduce, "ring", RANKS, 1.0) == [2.0, 2.0, 1.0]
    # Every other device, all the way round, beside the group in between.
    assert slower(all_gather, "ring", np.array([4.0]), 2.0) == [2.0]
    assert slower(all_gather, "ring", np.array([2.0]), 4.0) == [4.0]


def test_all_to_all_passes_on_what_is_for_others():
    # Two on a line: half of the bandwidth. Four: 4 pairs each way over the middle link, 8 / 3 of what each sends.
    # All eight: 16 / 7 places on average.
    assert slower(all_to_all, "ring", RANKS, 1.0) == [2.0, round(8 / 3, 3), round(16 / 7, 3)]


def test_a_message_along_a_ring():
    assert slower(transfer, "ring", np.array([1.0, 2.0, 4.0, 7.0])) == [2.0, 4.0, 8.0, 2.0]


def test_nodes_are_places_of_the_next_level():
    ring = load_cluster("64xH100").with_level("network", topology="ring")
    switch = load_cluster("64xH100")
    ratio = all_reduce(SIZE, np.array([8.0, 4.0]), 8.0, ring, ONE) / all_reduce(
        SIZE, np.array([8.0, 4.0]), 8.0, switch, ONE
    )
    assert ratio.round(3).tolist() == [1.0, 2.0]


def test_a_topology_that_is_not_known(tmp_path):
    from lockstep.plan.cluster import _LIBRARY

    text = (_LIBRARY / "Ascend-910B.yaml").read_text()
    assert "topology: mesh" in text
    (tmp_path / "mine.yaml").write_text(text.replace("topology: mesh", "topology: torus"))
    with pytest.raises(
        LockstepError, match=r"level 0\.topology is 'torus', expected one of \"switch\", \"mesh\", \"ring\""
    ):
        load_cluster(f"8x{tmp_path / 'mine.yaml'}")
