"""Which choice applies to a model when several nodes, workflows and other packs choose for it."""

from __future__ import annotations

import itertools

from multigpu.lifecycle.policy import Standing
from multigpu.lifecycle.prompt import Speaker
from multigpu.lifecycle.words import Words

FLAGGED, PINNED, UNMANAGED = Standing.EJECT, Standing.KEEP, Standing.DEFAULT
ONE, TWO, ELSEWHERE = Speaker("a", "4"), Speaker("a", "5"), Speaker("b", "4")


def after(*said: tuple[Standing, Speaker | None, int]) -> Standing:
    words = Words()
    for standing, speaker, prompt in said:
        words.say(standing, speaker, prompt)
    return words.standing


def test_nothing_was_said() -> None:
    assert after() is UNMANAGED


def test_the_newest_prompt_decides() -> None:
    assert after((PINNED, ONE, 1)) is PINNED
    assert after((PINNED, ONE, 1), (FLAGGED, ONE, 2)) is FLAGGED
    assert after((PINNED, ONE, 1), (FLAGGED, ELSEWHERE, 2)) is FLAGGED, "another workflow's node"
    assert after((FLAGGED, ELSEWHERE, 1), (PINNED, ONE, 2)) is PINNED
    assert after((PINNED, ONE, 1), (FLAGGED, None, 1)) is PINNED, "in one prompt keep wins"
    assert after((PINNED, ONE, 1), (FLAGGED, None, 2)) is FLAGGED, "from outside"


def test_in_one_prompt_keep_wins_in_whichever_order() -> None:
    for order in itertools.permutations([(PINNED, ONE, 3), (FLAGGED, TWO, 3), (UNMANAGED, ELSEWHERE, 3)]):
        assert after(*order) is PINNED


def test_every_sequence_of_one_node_ends_as_its_last_word_says() -> None:
    for length in range(1, 5):
        for said in itertools.product(Standing, repeat=length):
            assert after(*((word, ONE, number) for number, word in enumerate(said))) is said[-1]


def test_default_takes_back_only_what_the_same_node_said() -> None:
    assert after((PINNED, ONE, 1), (UNMANAGED, ONE, 2)) is UNMANAGED
    assert after((PINNED, ONE, 1), (UNMANAGED, TWO, 2)) is PINNED, "another node of the same workflow"
    assert after((PINNED, ONE, 1), (UNMANAGED, ELSEWHERE, 2)) is PINNED, "a node of the same id in another workflow"
    assert after((PINNED, None, 1), (UNMANAGED, ONE, 2)) is PINNED, "said from outside"
    assert after((PINNED, ONE, 1), (FLAGGED, TWO, 2), (UNMANAGED, TWO, 3)) is PINNED, "what the other said holds again"


def test_default_from_outside_takes_everything_back() -> None:
    assert after((PINNED, ONE, 1), (FLAGGED, TWO, 1), (UNMANAGED, None, 1)) is UNMANAGED
