"""Simulated devices compute what the CPU computes, keep apart, and refuse to mix."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn


def assert_equal(simulated: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(simulated.cpu(), expected.cpu())


OPERATIONS = {
    "add": lambda x: x + x,
    "matmul": lambda x: x @ x.t(),
    "sum": lambda x: x.sum(1),
    "slice": lambda x: x[1:3, ::2],
    "view": lambda x: x.view(-1),
    "permute": lambda x: x.permute(1, 0).contiguous(),
    "cat": lambda x: torch.cat([x, x], 0),
    "unfold": lambda x: x.unfold(1, 2, 1),
    "mask": lambda x: x[x > 0],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "softmax": lambda x: x.softmax(-1),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "cast": lambda x: x.to(torch.bfloat16),
    "topk": lambda x: x.topk(2).values,
    "interpolate": lambda x: F.interpolate(x[None, None], scale_factor=2.0),
    "fft": lambda x: torch.view_as_real(torch.fft.rfft(x)),
    "conj": lambda x: torch.view_as_real(torch.fft.rfft(x).conj().resolve_conj()),
    "index": lambda x: x[torch.tensor([0, 2], device=x.device)],
    "index by cpu": lambda x: x[torch.tensor([0, 2])],
    "assign": lambda x: x.clone().index_fill_(0, torch.tensor([1], device=x.device), 3.0),
    "in place": lambda x: x.clone().mul_(2).add_(1),
    "out": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
    "fp8": lambda x: x.to(torch.float8_e4m3fn).to(torch.bfloat16),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_equal_the_cpu(sim, name):
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    result = OPERATIONS[name](x.to(sim.device(1)))
    assert result.device == torch.device(sim.device(1))
    assert_equal(result, OPERATIONS[name](x))


LAYERS = {
    "linear": (nn.Linear(8, 16), (2, 8)),
    "layer norm": (nn.LayerNorm(8), (2, 3, 8)),
    "group norm": (nn.GroupNorm(2, 4), (1, 4, 6, 6)),
    "rms norm": (nn.RMSNorm(8), (2, 8)),
    "conv": (nn.Conv2d(3, 8, 3, padding=1), (1, 3, 8, 8)),
    "conv3d": (nn.Conv3d(3, 4, 3, padding=1), (1, 3, 4, 6, 6)),
    "gelu": (nn.GELU("tanh"), (5, 7)),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_equal_the_cpu(sim, name, dtype, mode):
    layer, shape = LAYERS[name]
    layer = copy.deepcopy(layer).to(dtype)
    there = copy.deepcopy(layer).to(sim.device(2))
    x = torch.randn(shape).to(dtype)
    with mode():
        assert_equal(there(x.to(sim.device(2))), layer(x))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_equals_the_cpu(sim, dtype, masked):
    q, k, v = (torch.randn(1, 2, 16, 8).to(dtype) for _ in range(3))
    mask = torch.full((16, 16), float("-inf")).triu(1).to(dtype) if masked else None
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    there = [t.to(sim.device(0)) for t in (q, k, v)]
    result = F.scaled_dot_product_attention(*there, attn_mask=None if mask is None else mask.to(sim.device(0)))
    assert_equal(result, expected)


def test_gradients_match_the_cpu(sim):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    there = copy.deepcopy(model).to(sim.device(1))
    x = torch.randn(2, 3, 6, 6)
    model(x).sum().backward()
    there(x.to(sim.device(1))).sum().backward()
    for ours, theirs in zip(there.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


def test_views_share_the_memory(sim):
    base = torch.zeros(4, 4, device=sim.device(0))
    before = sim.allocated(0)
    row = base[1]
    row.add_(1)
    assert base.sum().item() == 4
    assert row.data_ptr() - base.data_ptr() == 16
    assert row.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    del row
    assert sim.allocated(0) == before


MIXES = {
    "add": lambda a, b: a + b,
    "matmul": lambda a, b: a @ b,
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack([a, b]),
    "linear": lambda a, b: F.linear(a, b),
    "bias": lambda a, b: F.linear(a, a, b[0]),
    "layer norm": lambda a, b: F.layer_norm(a, (2,), b[0]),
    "group norm": lambda a, b: F.group_norm(a[None, None], 1, b[0, :1]),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "attention": lambda a, b: F.scaled_dot_product_attention(a[None], b[None], a[None]),
    "in place": lambda a, b: a.add_(b),
    "conv": lambda a, b: F.conv2d(a[None, None], b[None, None]),
    "embedding": lambda a, b: F.embedding((b[0] * 0).long(), a),
}


@pytest.mark.parametrize("other", [1, "cpu"])
@pytest.mark.parametrize("name", MIXES)
def test_mixing_devices_raises(sim, name, other):
    a = torch.ones(2, 2, device=sim.device(0))
    b = torch.ones(2, 2, device=other if other == "cpu" else sim.device(other))
    with pytest.raises(RuntimeError, match="same device"):
        MIXES[name](a, b)


def test_cpu_memory_cannot_be_indexed_from_a_device(sim):
    with pytest.raises(RuntimeError):
        torch.ones(4)[torch.tensor([0], device=sim.device(0))]
    with pytest.raises(RuntimeError):
        torch.ones(4, device=sim.device(1))[torch.tensor([0], device=sim.device(0))]


def test_scalars_mix(sim):
    a = torch.ones(2, device=sim.device(1))
    assert_equal(a + torch.tensor(2.0), torch.full((2,), 3.0))
    assert_equal(a * 3, torch.full((2,), 3.0))


def test_device_contexts_and_bounds(sim):
    module = torch.get_device_module(sim.kind)
    assert module.device_count() == 3
    with module.device(2):
        assert torch.ones(1, device=sim.kind).device.index == 2
        assert module.current_device() == 2
    assert module.current_device() == 0
    with torch.device(sim.device(1)):
        assert torch.ones(1).device == torch.device(sim.device(1))
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        torch.ones(1, device=f"{sim.kind}:7")
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        module.set_device(3)


def test_accelerator_interface(sim):
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == sim.kind
    assert torch.accelerator.device_count() == 3
    with torch.accelerator.device_index(1):
        assert torch.accelerator.current_device_index() == 1
    x = torch.ones(1000, device=sim.device(1))
    assert torch.accelerator.memory_stats(1)["allocated_bytes.all.current"] == sim.allocated(1) >= 4096
    assert torch.accelerator.get_memory_info(1)[1] == 1024**3
    torch.accelerator.synchronize(1)
    assert x.sum().item() == 1000


def test_a_generator_per_device(sim):
    generator = torch.Generator(device=sim.device(1)).manual_seed(3)
    there = torch.randn(5, generator=generator, device=sim.device(1))
    assert_equal(there, torch.randn(5, generator=torch.Generator().manual_seed(3)))
    torch.manual_seed(1)
    first = torch.rand(3, device=sim.device(0))
    torch.manual_seed(1)
    assert_equal(torch.rand(3, device=sim.device(0)), first)
    module = torch.get_device_module(sim.kind)
    state = module.get_rng_state()
    second = torch.rand(3, device=sim.device(0))
    module.set_rng_state(state)
    assert_equal(torch.rand(3, device=sim.device(0)), second)


def test_saving_and_copying_keep_the_device(sim):
    x = torch.randn(3, device=sim.device(1))
    parameter = nn.Parameter(x.clone())
    buffer = io.BytesIO()
    torch.save({"x": x, "parameter": parameter}, buffer)
    for place, expected in ((None, sim.device(1)), ("cpu", "cpu"), (sim.device(2), sim.device(2))):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=place)
        assert loaded["x"].device == torch.device(expected)
        assert_equal(loaded["x"], x)
    assert_equal(pickle.loads(pickle.dumps(x)), x)
    clone = copy.deepcopy(parameter)
    assert clone.device == parameter.device
    assert_equal(clone, parameter)


def test_storages(sim):
    x = torch.randn(4, device=sim.device(1))
    storage = x.untyped_storage()
    assert (storage.device, storage.nbytes()) == (torch.device(sim.device(1)), 16)
    assert_equal(torch.empty(0, device=sim.device(1)).set_(storage, 1, (2,)), x[1:3])
    storage.resize_(0)
    assert storage.nbytes() == 0
    x.data = torch.ones(3, device=sim.device(0))
    assert_equal(x, torch.ones(3))


def test_modules_move_and_load(sim):
    source = nn.Linear(4, 4)
    empty = nn.Linear(4, 4, device="meta").to_empty(device=sim.device(2))
    empty.load_state_dict(source.state_dict())
    assert_equal(empty.weight, source.weight)
    moved = copy.deepcopy(source).to(sim.device(1))
    assert {p.device.index for p in moved.parameters()} == {1}


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast(sim, enabled):
    x = torch.ones(2, 2, device=sim.device(0))
    with torch.autocast(sim.kind, dtype=torch.bfloat16, enabled=enabled):
        result = F.linear(x, x)
    assert result.dtype == (torch.bfloat16 if enabled else torch.float32)
