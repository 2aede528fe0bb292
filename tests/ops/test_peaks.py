"""The measured peaks, and the device class that the processor's own flags give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.ops import build, peaks
from lockstep.ops import device_class as classes
from lockstep.ops.device_class import device_class, instruction_sets


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small products: what is tested is how the numbers are made, not the machine."""
    measures = (peaks.matrix_peak, peaks.torch_rate, peaks.contract_rate)
    monkeypatch.setattr(peaks, "_LARGEST", 128)
    for measure in measures:
        measure.cache_clear()
    yield
    for measure in measures:
        measure.cache_clear()


def test_the_peak_is_the_best_of_what_can_multiply(monkeypatch):
    rates = {("torch", torch.float32): 40e9, ("torch", torch.bfloat16): 1e9}
    rates |= {("contract", torch.float32): 30e9, ("contract", torch.bfloat16): 50e9}
    monkeypatch.setattr(peaks, "torch_rate", lambda dtype: rates["torch", dtype])
    monkeypatch.setattr(peaks, "contract_rate", lambda dtype: rates["contract", dtype])
    monkeypatch.setattr(build, "is_built", lambda isa: True)
    assert peaks.matrix_peak(torch.bfloat16) == 50e9
    assert peaks.matrix_peak(torch.float32) == 40e9, "a bfloat16 rate says nothing about float32"
    peaks.matrix_peak.cache_clear()
    monkeypatch.setattr(build, "is_built", lambda isa: False)
    assert peaks.matrix_peak(torch.bfloat16) == 40e9, "bfloat16 values can be multiplied in float32"


def test_rates_are_positive_and_measured_once():
    first = peaks.torch_rate(torch.float32)
    assert first > 1e6
    assert peaks.torch_rate(torch.float32) == first
    assert peaks.read_bandwidth() > 1e7


def test_a_meter_measures_anew_with_what_is_the_fastest(monkeypatch):
    monkeypatch.setattr(build, "is_built", lambda isa: False)
    asked = []

    def meter(dtype: torch.dtype):
        def rate() -> float:
            asked.append(dtype)
            return (40e9 if dtype == torch.float32 else 1e9) + len(asked)

        return rate

    monkeypatch.setattr(peaks, "_torch_meter", meter)
    measure = peaks.matrix_meter(torch.bfloat16)
    asked.clear()
    assert [measure(), measure()] == [40e9 + 1, 40e9 + 2]
    assert asked == [torch.float32] * 2


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux tells its processor's flags there")
def test_the_device_class_follows_the_processors_flags(pytestconfig):
    if pytestconfig.getoption("--device-class"):
        pytest.skip("the processor is taken for another")
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    expected = "cpu-fma" if {"avx2", "fma"} <= {*flags} else "cpu-generic"
    if "avx512_bf16" in flags:
        expected = "cpu-amx-bf16" if "amx_bf16" in flags and torch.cpu._init_amx() else "cpu-avx512-bf16"
    assert device_class() == expected
    assert ("avx2" in instruction_sets()) == ("avx2" in flags)


AVX512 = {"avx2", "fma3", "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl"}
AMX = AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}


@pytest.mark.parametrize(
    ("sets", "capability", "name", "isa"),
    [
        (AMX, "AVX512", "cpu-amx-bf16", "amx-bf16"),
        (AMX, "AVX2", "cpu-fma", "avx2"),
        (AMX - {"amx_bf16"}, "AVX512", "cpu-avx512-bf16", "avx512-bf16"),
        (AVX512 | {"avx512_bf16"}, "AVX512", "cpu-avx512-bf16", "avx512-bf16"),
        (AVX512 | {"avx512_bf16"}, "AVX2", "cpu-fma", "avx2"),  # ATEN_CPU_CAPABILITY=avx2
        ({"avx2", "fma3", "avx512_f", "avx512_bf16"}, "AVX512", "cpu-fma", "avx512"),
        (AVX512, "AVX512", "cpu-fma", "avx512"),
        ({"avx2", "fma3"}, "AVX2", "cpu-fma", "avx2"),
        ({"avx2"}, "DEFAULT", "cpu-generic", "plain"),
        (set(), "DEFAULT", "cpu-generic", "plain"),
    ],
)
def test_the_device_class_of_other_machines_and_its_kernels(monkeypatch, sets, capability, name, isa):
    monkeypatch.setattr("lockstep.ops.device_class.instruction_sets", lambda: frozenset(sets))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(classes, "_amx_is_given", lambda: True)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert (device_class(), build.best_isa()) == (name, isa)


@pytest.mark.parametrize(
    ("most", "given", "name", "as_before"),
    [
        ("", False, "cpu-avx512-bf16", ""),  # a kernel that has no tiles, or does not give them
        ("AVX512_CORE_BF16", True, "cpu-avx512-bf16", ""),  # to go on with what such a processor has begun
        ("avx512_core_amx", True, "cpu-amx-bf16", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        ("DEFAULT", True, "cpu-amx-bf16", "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
    ],
)
def test_a_processor_with_tiles_that_may_not_be_used(monkeypatch, most, given, name, as_before):
    monkeypatch.setattr("lockstep.ops.device_class.instruction_sets", lambda: frozenset(AMX))
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
    classes._amx_is_given.cache_clear()
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: given)
    try:
        assert device_class() == name
        found = [classes.environment_for(other) for other in ("cpu-avx512-bf16", "cpu-fma", "cuda-sm90")]
        assert found == [as_before, "ATEN_CPU_CAPABILITY=avx2", ""]
    finally:
        classes._amx_is_given.cache_clear()
