"""Cluster descriptions: names, counts, own files and mistakes."""

import pytest

from lockstep.errors import LockstepError
from lockstep.plan import load_cluster
from lockstep.plan.cluster import cluster_names

ASKED = ["A100-40", "A100-80", "H100", "H200", "B200", "V100", "Ascend-910B"]


@pytest.mark.parametrize("name", ASKED)
def test_library(name):
    cluster = load_cluster(f"16x{name}")
    assert (cluster.devices, cluster.device.name, cluster.node) == (16, name, 8)
    assert cluster.device.matrix_tflops["bf16"] > 100
    assert cluster.sources  # each number says where it is from
    assert cluster.levels[0].gb_s > cluster.levels[1].gb_s


def test_library_is_complete():
    assert sorted(ASKED) == cluster_names()


def test_alias_and_case():
    assert load_cluster("8xa100").device.name == "A100-80"
    assert load_cluster("8 x 910B").device.name == "Ascend-910B"


def test_unknown_device_names_the_nearest():
    with pytest.raises(LockstepError, match="unknown device 'H10': the nearest name is 'H100'"):
        load_cluster("64xH10")
    with pytest.raises(LockstepError, match="nearest name is 'H100'"):
        load_cluster("8xNVIDIA-H100-SXM5")
    with pytest.raises(LockstepError, match="nearest name is 'Ascend-910B'"):
        load_cluster("64xascend-910")


def test_count_is_needed():
    with pytest.raises(LockstepError, match="write for example 8xH100"):
        load_cluster("H100")
    with pytest.raises(LockstepError, match="no devices"):
        load_cluster("0xH100")


@pytest.mark.parametrize("given", ["64", "xH100", "-4xH100", "1.5xH100", "64x", ""])
def test_no_count(given):
    with pytest.raises(LockstepError, match="expected a whole number of devices and their name, as in 8xH100"):
        load_cluster(given)


def test_too_many_devices():
    with pytest.raises(LockstepError, match="counts up to 16,777,216 devices"):
        load_cluster("99999999999xH100")


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"\x8a\xff")
    with pytest.raises(LockstepError, match="cannot be read as YAML"):
        load_cluster(f"8x{tmp_path / 'mine.yaml'}")


def test_own_file(tmp_path):
    from lockstep.plan.cluster import _LIBRARY

    text = (_LIBRARY / "H100.yaml").read_text().replace("name: H100", "name: Mine\ndevices: 4", 1)
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    assert load_cluster(str(file)).devices == 4
    assert load_cluster(f"32x{file}").name == "32xMine"
    file.write_text(text.replace("cores:", "kores:"))
    with pytest.raises(LockstepError, match="kores"):
        load_cluster(str(file))
    file.write_text(text.replace("memory_gb: 80", "memory_gb: -80"))
    with pytest.raises(LockstepError, match=r"memory_gb is -80\.0; give a finite number of at least 1e-09"):
        load_cluster(str(file))
    with pytest.raises(LockstepError, match="does not exist"):
        load_cluster("4xnowhere.yaml")


def test_with_level():
    slower = load_cluster("16xH100").with_level("network", gb_s=10)
    assert slower.levels[1].gb_s == 10
    with pytest.raises(LockstepError, match="levels are node, network"):
        slower.with_level("rack", gb_s=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("9" * 5000 + "xH100", "counts up to 16,777,216 devices"),
        (f"8x{'y' * 300}.yaml", "does not exist"),
        ("8x" + "y" * 300, "unknown device 'yyy"),
    ],
)
def test_counts_and_names_of_any_length(given, message):
    with pytest.raises(LockstepError, match=message) as error:
        load_cluster(given)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cores: 132", "cores: 132\n  cores: 13", "the key 'cores' stands here and in line"),
        ("name: H100\n", "", "mine.yaml' has no name; it is needed"),
        ("name: H100\n", "name: 100\n", "name is 100, expected text"),
        ("{bf16: 989, fp16: 989, fp32: 494, fp8: 1979}", "{}", "matrix_tflops is empty: give a rate for each dtype"),
        ("[H100-80,", "[80,", "an entry of aliases is 80; give a str"),
        ("levels:", "uncertanty: 2\nlevels:", "unknown key 'uncertanty': the nearest is 'uncertainty'"),
        (
            "matrix_efficiency: 0.72",
            "matrix_efficiency: 72",
            "matrix_efficiency, a fraction of the rate, is 72.0; give",
        ),
        ("name: network", "name: node", "two levels are called 'node'"),
        ("memory_gb_s: 3350", "memory_gb_s: 5.0e-324", "memory_gb_s is 5e-324; give a finite number of at least 1e-09"),
        ("latency_us: 20", f"latency_us: 1{'0' * 30}", r"latency_us of level node is 1e\+30; give"),
        ("size: 1000000", f"size: 1{'0' * 30}", "size of level network is 10+; give a whole number from 1"),
    ],
)
def test_descriptions_with_mistakes(old, new, message, tmp_path):
    from lockstep.plan.cluster import _LIBRARY

    text = (_LIBRARY / "H100.yaml").read_text()
    assert old in text
    (tmp_path / "mine.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(LockstepError, match=message):
        load_cluster(f"8x{tmp_path / 'mine.yaml'}")


def test_sources_are_a_list(tmp_path):
    from lockstep.plan.cluster import _LIBRARY

    text = (_LIBRARY / "H100.yaml").read_text().partition("sources:")[0]
    (tmp_path / "mine.yaml").write_text(text + "sources: 5\n")
    with pytest.raises(LockstepError, match="sources is 5; give a list"):
        load_cluster(f"8x{tmp_path / 'mine.yaml'}")
