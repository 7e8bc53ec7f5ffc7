"""Weights as the engine keeps them: views into byte arenas, fp8 storage, quantised bytes, shared among threads."""

from __future__ import annotations

import copy
import importlib.util
import threading
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from torch import nn


@pytest.fixture
def api(sim):
    return torch.get_device_module(sim.kind)


@pytest.fixture(scope="module")
def quantised():
    """The probe pack's tensor class; the pack itself can only be imported inside ComfyUI."""
    path = Path(__file__).parent / "probe_pack" / "quantised.py"
    spec = importlib.util.spec_from_file_location("simdev_probe_quantised", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.QuantisedTensor


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parameters_that_point_into_an_arena(sim, dtype, mode):
    layer = nn.Linear(8, 4, bias=False).to(dtype)
    layer.requires_grad_(False)
    there = copy.deepcopy(layer).to(sim.device(0))
    sim.reset()
    arena = torch.empty(4096, dtype=torch.uint8, device=sim.device(0))
    x = torch.randn(3, 8).to(dtype)
    views = [arena[at : at + layer.weight.nbytes].view(dtype).view(layer.weight.shape) for at in (0, 1024)]
    with mode():
        for offset, view in zip((0, 1024), views, strict=True):
            view.copy_(layer.weight)
            there.weight.data = view
            assert there.weight.data_ptr() == arena.data_ptr() + offset
            assert torch.equal(there(x.to(sim.device(0))).cpu(), layer(x))
        assert sim.moved("cpu", sim.device(0)) == 2 * (layer.weight.nbytes + x.nbytes)
    clone = copy.deepcopy(there)
    assert clone.weight.device == torch.device(sim.device(0))
    assert clone.weight.data_ptr() != there.weight.data_ptr()


def test_where_parameter_data_may_point(sim):
    """On CUDA `data` may cross to the CPU and take views made in inference mode; on PrivateUse1 (npu) torch refuses."""
    layer = nn.Linear(4, 4, device=sim.device(0)).requires_grad_(False)
    arena = torch.zeros(64, dtype=torch.uint8, device=sim.device(0))
    with torch.inference_mode():
        inference_view = arena.view(torch.float32).view(4, 4)
    for target in (layer.weight.data.cpu(), inference_view):
        if sim.kind == "npu":
            with pytest.raises(RuntimeError, match="incompatible tensor type"):
                layer.weight.data = target
        else:
            layer.weight.data = target
            assert layer.weight.data_ptr() == target.data_ptr()
    layer.weight.data = arena.view(torch.float32).view(4, 4)
    assert layer.weight.data_ptr() == arena.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_storage(sim, dtype):
    weight = torch.randn(8, 8).to(dtype)
    arena = torch.empty(64, dtype=torch.uint8, device=sim.device(1))
    arena.copy_(weight.view(torch.uint8).view(-1))
    there = arena.view(dtype).view(8, 8)
    assert sim.moved("cpu", sim.device(1)) == 64
    assert torch.equal(there.to(torch.bfloat16).cpu(), weight.to(torch.bfloat16))
    moved = there.to(sim.device(0)).to(torch.bfloat16)
    assert sim.moved(sim.device(1), sim.device(0)) == 64
    x = torch.randn(2, 8).bfloat16()
    assert torch.equal((x.to(sim.device(0)) @ moved).cpu(), x @ weight.to(torch.bfloat16))


def test_quantised_bytes_travel_and_are_decoded_on_arrival(sim, quantised):
    values = torch.randn(16, 64)
    weight = nn.Parameter(quantised.quantise(values), requires_grad=False)
    expected = torch.from_numpy(
        numpy.asarray(
            gguf.quants.dequantize(weight.data.as_subclass(torch.Tensor).numpy(), gguf.GGMLQuantizationType.Q8_0)
        )
    )
    assert weight.shape == (16, 64)
    resting = weight.to(sim.device(1))
    arrived = resting.to(sim.device(0))
    assert arrived.shape == (16, 64)
    assert sim.moved(sim.device(1), sim.device(0)) == 16 * 64 // 32 * 34
    decoded = arrived.values(torch.float32)
    assert decoded.device == torch.device(sim.device(0))
    assert torch.equal(decoded.cpu(), expected)


def test_adding_a_low_rank_update_in_full_precision(sim):
    """As LoRA does: bf16 weight, update computed in fp32 on the device, rounded once."""
    weight, up, down = torch.randn(16, 8).bfloat16(), torch.randn(16, 2), torch.randn(2, 8)

    def patched(device):
        return (weight.to(device).float() + 0.5 * (up.to(device) @ down.to(device))).to(torch.bfloat16)

    assert torch.equal(patched(sim.device(2)).cpu(), patched("cpu"))


def test_threads_compute_on_their_own_devices(sim, api):
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)).requires_grad_(False)
    x = torch.randn(4, 32)
    expected = x
    for _ in range(20):
        expected = model(expected)
    results: dict[int, torch.Tensor] = {}

    def work(index):
        api.set_device(sim.device(index))
        mine = copy.deepcopy(model).to(sim.kind)
        value = x.to(sim.kind)
        stream = api.Stream()
        for _ in range(20):
            staged = value.cpu().pin_memory()
            stream.wait_stream(api.current_stream())
            with api.stream(stream):
                value = staged.to(sim.kind, non_blocking=True)
            api.current_stream().wait_stream(stream)
            value.record_stream(api.current_stream())
            value = mine(value)
        results[index] = value.cpu()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [0, 1, 2]
    for result in results.values():
        assert torch.equal(result, expected)
    assert api.current_device() == 0


def test_the_current_device_and_stream_belong_to_the_thread(sim, api):
    seen = []

    def look():
        seen.append((api.current_device(), api.current_stream(sim.device(0)).stream_id))

    with api.stream(api.Stream(sim.device(0))), api.device(1):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(60)
    assert seen == [(0, 0)]


def test_one_thread_may_wait_for_the_stream_of_another(sim, api):
    source = torch.ones(1000).pin_memory()
    target = torch.zeros(1000, device=sim.device(0))
    side = api.Stream(sim.device(0))
    side.wait_stream(api.current_stream(sim.device(0)))
    events = []

    def upload():
        with api.stream(side):
            target.copy_(source, non_blocking=True)
            events.append(side.record_event())

    thread = threading.Thread(target=upload)
    thread.start()
    thread.join(60)
    api.current_stream(sim.device(0)).wait_event(events[0])
    assert target.sum().item() == 1000
