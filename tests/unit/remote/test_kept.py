"""Tensors that are sent once: what one side refers to, the other has."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multigpu.host.remote import kept
from multigpu.host.remote.kept import Keeping, Sending, Sent, short


class Pair:
    """Both sides."""

    def __init__(self) -> None:
        self.sent, self.keeping = Sent(), Keeping()

    def send(self, value: Any) -> int:
        """Send it, and have it back in an answer, which must not send it back. Returns how many tensors were sent."""
        sending = Sending(self.sent)
        short_value = sending.short(value)
        self.keeping.take(sending.new, sending.converted, self.sent.surplus(sending.used))
        named: dict[int, list[int]] = {}
        there = self.keeping.whole({"value": short_value}, named)["value"]
        torch.testing.assert_close(there, value, rtol=0, atol=0)
        answer = short({"same": there}, named)
        assert "tensor" not in str(answer)
        assert sending.whole(answer)["same"] is value
        return len(sending.new)


def test_a_tensor_is_sent_once_in_whatever_batch_or_type_it_is() -> None:
    pair, (one, two) = Pair(), torch.rand(2, 1, 64, 32)
    assert pair.send(one) == 1
    assert pair.send(one.clone()) == 0
    assert pair.send(torch.cat([one, two])) == 1
    assert pair.send(torch.cat([two, one, two])) == 0
    assert pair.send(two.to(torch.bfloat16)) == 0
    assert pair.send((two + 1).expand(3, 64, 32)) == 1
    assert pair.send((two + 1).expand(3, 64, 32)) == 0
    assert pair.send(one.mT) == 1, "kernels may round differently in another order of dimensions"
    pair.sent.forget()
    assert pair.send(one) == 1


@pytest.mark.parametrize("limits", [{"MOST_KEPT": 5}, {"MOST_KEPT_BYTES": 5 * 8192}])
def test_both_sides_forget_what_was_not_used_for_longest(
    limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(kept, name, value)
    pair, rows = Pair(), torch.rand(9, 1, 64, 32).unbind()
    assert [pair.send(row) for row in rows] == [1] * 9
    assert len(pair.keeping._tensors) == 5
    assert [pair.send(row) for row in rows[4:]] == [0] * 5
    assert pair.send(rows[3]) == 1 and pair.send(rows[4]) == 1
    assert pair.send(torch.cat(rows[:5])) == 3, "nothing that this call uses is forgotten"
