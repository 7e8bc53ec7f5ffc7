"""Computing ahead on a device without streams; the same in a real ComfyUI is in tests/engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from multigpu.stream import hoisting
from multigpu.stream.arena import Arena
from multigpu.stream.hoisting import Hoisting
from multigpu.stream.homes import HomedBlock, fill, lay_out_block, settle_in
from multigpu.stream.streamer import Streamer

CPU = torch.device("cpu")
WIDTH, LAYERS = 16, 3
RUN = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
Change = Callable[[int, float, torch.Tensor], torch.Tensor]


class Model(torch.nn.Module):
    """A timestep embedding, and layers that are modulated by it. `change` is what a patch makes of it in each layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(WIDTH, WIDTH)
        self.mods = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.bodies = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.requires_grad_(False)
        self.change: Change = lambda layer, sigma, token: token
        self.calls = 0

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, text: float = 1.0) -> torch.Tensor:
        self.calls += 1
        token = self.embed(torch.outer(sigma, torch.linspace(-1, text, WIDTH)))
        for number, (mod, body) in enumerate(zip(self.mods, self.bodies, strict=True)):
            seen = self.change(number, sigma[0].item(), torch.nn.functional.silu(token))
            if number % 2:
                seen = seen[:, None]
            scale = mod(seen).view(len(sigma), WIDTH)
            scale += 1  # in place, as models do it
            x = torch.tanh(body(x) * scale)
        return x


@dataclass
class Pass:
    """What the host tells of a pass."""

    model: Model
    sigmas: torch.Tensor
    schedule: torch.Tensor | None
    text: float

    def sigma(self) -> float | None:
        values = {*self.sigmas.tolist()}
        return values.pop() if len(values) == 1 else None

    def probe(self, sigma: float) -> None:
        self.model(torch.zeros(len(self.sigmas), WIDTH), torch.full_like(self.sigmas, sigma), self.text)


class Streamed:
    """The model, streamed, with its `mods` hoisted; and a resident one beside it."""

    def __init__(self, ring: int = 1 << 20) -> None:
        self.model, self.resident = Model(), Model()
        blocks = []
        for name, module in self.model.named_modules():
            if isinstance(module, torch.nn.Linear):
                laid, size = lay_out_block(module)
                room = Arena(CPU, [size]).room(size)
                fill(room, laid)
                blocks.append(HomedBlock(name, module, room, settle_in(room, laid)))
        blocks = [blocks[number] for number in (0, 1, 4, 2, 5, 3, 6)]  # as they run
        self.refused: set[str] = set()
        self.streamer = Streamer(blocks, CPU, ring)
        mods = [number for number, block in enumerate(blocks) if "mods" in block.name]
        self.hoisting = Hoisting(blocks, mods, self.refused, self.streamer.aside)
        self.streamer.hoisting = self.hoisting
        self.streamer.attach()
        self.size, self.hoisted = blocks[0].size, len(mods)

    def __call__(self, sigma: float, schedule: torch.Tensor | None = RUN, text: float = 1.0, batch: int = 1) -> bool:
        """Run one pass, which gives the numbers of the other model. Whether it needed no weights of hoisted layers."""
        x, sigmas = torch.ones(batch, WIDTH), torch.full((batch,), sigma)
        before = self.streamer.counters.hoisted
        found = self.hoisting.run(lambda: self.model(x, sigmas, text), Pass(self.model, sigmas, schedule, text))
        assert torch.equal(found, self.resident(x, sigmas, text))
        assert not any("forward" in vars(module) for module in self.model.modules())
        return self.streamer.counters.hoisted - before == self.hoisted

    def run(self, schedule: torch.Tensor = RUN, **how: Any) -> list[bool]:
        return [self(sigma, schedule, **how) for sigma in schedule.tolist() if sigma]

    def change(self, change: Change) -> None:
        self.model.change = self.resident.change = change


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Streamer, "poison", True)


@pytest.fixture
def its() -> Streamed:
    return Streamed()


@pytest.mark.parametrize("ring", [1, 2500, 1 << 20])
def test_only_the_first_pass_of_a_run_needs_their_weights(ring: int) -> None:
    its = Streamed(ring)
    assert its.run() == [False, True, True, True]
    assert its.run() == [True] * 4, "the same once more"
    copied = its.streamer.counters.copied_bytes
    assert its.run() == [True] * 4
    assert its.streamer.counters.copied_bytes - copied == 4 * (LAYERS + 1) * its.size
    assert not its.refused


def test_other_sigmas_of_the_same_condition_are_made_in_the_first_pass(its: Streamed) -> None:
    its.run()
    assert its.run(torch.tensor([1.0, 0.6, 0.5, 0.1, 0.0])) == [False, True, True, True]
    assert its.run() == [True] * 4


def test_conditions_and_batches_have_what_was_kept_for_them(its: Streamed) -> None:
    for _ in range(2):
        for text, batch in ((1.0, 1), (2.0, 1), (1.0, 2), (2.0, 3)):
            assert its.run(text=text, batch=batch)[1:] == [True] * 3
    assert its.run(text=2.0) == [True] * 4
    in_turns = torch.tensor([0.9, 0.4, 0.0])
    assert [its(sigma, in_turns, text) for sigma in (0.9, 0.4) for text in (5.0, 6.0)] == [False, False, True, True]


def test_a_sigma_that_is_not_in_the_run_is_streamed(its: Streamed) -> None:
    ways = [its(sigma) for sigma in (1.0, 0.9, 0.75, 0.6, 0.5)]
    assert ways == [False, False, True, False, True]
    assert its(0.3, None) is False


def test_rows_of_different_sigmas(its: Streamed) -> None:
    x, sigmas = torch.ones(2, WIDTH), torch.tensor([1.0, 0.5])
    found = its.hoisting.run(lambda: its.model(x, sigmas), Pass(its.model, sigmas, RUN, 1.0))
    assert torch.equal(found, its.resident(x, sigmas))


def test_what_a_patch_changes_in_one_layer_is_seen(its: Streamed) -> None:
    its.change(lambda layer, sigma, token: token * 2 if layer == 1 and sigma < 0.6 else token)
    assert its(1.0) is False
    assert its(0.75) is True
    calls = its.model.calls
    its(0.5)
    assert its.model.calls - calls == 2, "the pass ran again"
    assert its(0.25) is False
    its.change(lambda layer, sigma, token: token)
    assert its.run() == [False, True, True, True]


def test_the_same_bytes_in_another_shape_are_something_else(its: Streamed) -> None:
    its.change(lambda layer, sigma, token: token[:, None] if layer == 2 and sigma < 0.6 else token)
    assert [its(1.0), its(0.75)] == [False, True]
    calls = its.model.calls
    its(0.5)
    assert its.model.calls - calls == 2


def test_inputs_that_lie_in_memory_in_an_unusual_way_are_streamed(its: Streamed) -> None:
    its.change(lambda layer, sigma, token: torch.stack([token, token], -1)[..., 0] if layer == 2 else token)
    its.hoisted -= 1
    assert its.run() == [False, True, True, True]


def test_a_layer_that_sees_something_else_is_streamed(its: Streamed) -> None:
    its.change(lambda layer, sigma, token: token + layer // 2)
    its.hoisted -= 1
    assert its.run() == [False, True, True, True]
    assert its.refused == {"mods.2"}
    assert its.run() == [True] * 4


def test_a_probe_that_does_not_get_there_or_sees_something_else(its: Streamed, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as within:
        within.setattr(Pass, "probe", lambda self, sigma: None)
        assert its.run() == [False] * 4
    with monkeypatch.context() as within:
        real = Pass.probe
        within.setattr(Pass, "probe", lambda self, sigma: real(self, sigma / 2))
        assert its.run() == [False] * 4
    assert its.run() == [False, True, True, True]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("at", range(1, 18, 2))
def test_an_error_anywhere_leaves_nothing_half_made(its: Streamed, error: type[BaseException], at: int) -> None:
    """In a probe, too."""
    left = [at]

    def stumble(layer: int, sigma: float, token: torch.Tensor) -> torch.Tensor:
        left[0] -= 1
        if not left[0]:
            raise error
        return token

    its.model.change = stumble
    with pytest.raises(error):
        its.run()
        its.run()
    its.model.change = its.resident.change
    assert its.run()[1:] == [True] * 3


def test_weights_that_change(its: Streamed) -> None:
    its.run()
    its.streamer.quiesce()
    for model in (its.model, its.resident):
        model.mods[1].weight.mul_(1.5)
    assert its.run() == [False, True, True, True]
    its.streamer.close()
    assert its.hoisting.kept_bytes == 0


def test_a_module_with_a_forward_of_its_own(its: Streamed) -> None:
    for model in (its.model, its.resident):
        module = model.mods[0]
        vars(module)["forward"] = lambda x, module=module: torch.nn.Linear.forward(module, x) * 2
    x = torch.ones(1, WIDTH)
    for sigma in (1.0, 0.75, 0.5):
        sigmas = torch.tensor([sigma])
        found = its.hoisting.run(lambda: its.model(x, sigmas), Pass(its.model, sigmas, RUN, 1.0))  # noqa: B023
        assert torch.equal(found, its.resident(x, sigmas))
    assert its.streamer.counters.hoisted == 2 * (LAYERS - 1)


def test_a_layer_that_is_called_in_another_way(its: Streamed) -> None:
    its.run()
    forward = its.model.forward

    def named(x: torch.Tensor, sigma: torch.Tensor, text: float) -> torch.Tensor:
        its.model.mods[0](input=torch.ones(1, WIDTH))
        return forward(x, sigma, text)

    its.model.forward = named  # type: ignore[method-assign]
    x, sigmas = torch.ones(1, WIDTH), torch.tensor([0.5])
    found = its.hoisting.run(lambda: its.model(x, sigmas, 1.0), Pass(its.model, sigmas, RUN, 1.0))
    assert torch.equal(found, its.resident(x, sigmas))


def test_calls_inside_of_a_call(its: Streamed) -> None:
    its.run()
    sigmas = torch.tensor([0.5])
    inner = Pass(its.model, sigmas, RUN, 1.0)
    x = torch.ones(1, WIDTH)
    found = its.hoisting.run(
        lambda: its.hoisting.run(lambda: its.model(x, sigmas), inner), Pass(its.model, sigmas, RUN, 1.0)
    )
    assert torch.equal(found, its.resident(x, sigmas))


def test_many_rows_are_not_one_token(its: Streamed) -> None:
    assert its.run(batch=hoisting.ROWS + 1) == [False] * 4
    assert not its.refused


def test_it_is_given_up_when_it_never_helps(its: Streamed) -> None:
    for number in range(hoisting.PATIENCE):
        assert its(0.1 + number, None) is False
    assert its.refused == {"mods.0", "mods.1", "mods.2"}
    assert its.run() == [False] * 4
    assert its.hoisting.kept_bytes == 0


def test_what_is_kept_is_bounded(its: Streamed, monkeypatch: pytest.MonkeyPatch) -> None:
    its.run()
    each = its.hoisting.kept_bytes // 4
    assert each == LAYERS * WIDTH * 4
    monkeypatch.setattr(hoisting, "LIMIT", 3 * each)
    long = torch.linspace(1, 0, 9)
    ways = its.run(long, text=3.0)
    assert its.hoisting.kept_bytes <= 3 * each
    assert ways == [False, True, True, False, True, True, False, True]
    for text in range(10):
        its.run(long, text=float(text))
        assert its.hoisting.kept_bytes <= 3 * each


def test_two_conditions_do_not_take_the_room_from_each_other(its: Streamed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hoisting, "LIMIT", 4 * LAYERS * WIDTH * 4)
    ways = [its(sigma, text=text) for sigma in (1.0, 0.75, 0.5, 0.25) for text in (1.0, 2.0)]
    assert ways[::2] == [False, True, True, True]


def test_without_memory_nothing_is_kept(its: Streamed, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = torch.nn.Linear.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if len(calls) == 8:
            raise RuntimeError("out of memory")
        return real(self, x)

    with monkeypatch.context() as within:
        within.setattr(torch.nn.Linear, "forward", forward)
        x, sigmas = torch.ones(1, WIDTH), torch.tensor([1.0])
        found = its.hoisting.run(lambda: its.model(x, sigmas), Pass(its.model, sigmas, RUN, 1.0))
    assert torch.equal(found, its.resident(x, sigmas)) and its.hoisting.kept_bytes == 0
    assert its.run() == [False, True, True, True]
