"""Plans are pure: the same on every rank, whatever the layout, with every row in each epoch once and no pack too long."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from swiftcp.data.plan import (
    FILLER,
    Pack,
    StepPlan,
    balanced,
    pack_cost,
    packs_of_rank,
    padded_length,
    plan_in_order,
    plan_packs,
    plan_rows,
)
from swiftcp.errors import ConfigError


def lengths_like_real(count: int, seed: int = 0, longest: int = 4096) -> list[int]:
    generator = random.Random(seed)
    return [min(longest, int(generator.lognormvariate(6, 1)) + 1) for _ in range(count)]


def plan(lengths: list[int], **options: Any) -> StepPlan:
    chosen = {"seed": 1, "global_batch_size": 4, "packing_length": 64, "pack_align": 8, "num_train_epochs": 1, **options}
    return StepPlan(lengths, **chosen)


def all_packs(steps: StepPlan) -> list[Pack]:
    return [pack for step in range(steps.num_steps) for pack in steps.step(step)]


@pytest.mark.parametrize("pack_align", [8, 64])
@pytest.mark.parametrize("count", [1, 7, 5000])
def test_every_row_once_and_no_pack_too_long(count: int, pack_align: int) -> None:
    lengths = lengths_like_real(count)
    packs = plan_packs(lengths, seed=0, epoch=0, packing_length=4096, pack_align=pack_align)
    assert sorted(row for pack in packs for row in pack) == list(range(count))
    assert max(sum(padded_length(lengths[row], pack_align) for row in pack) for pack in packs) <= 4096


def test_best_fit_against_a_naive_loop() -> None:
    lengths = lengths_like_real(300, longest=900)
    rows = sorted(range(300), key=lambda row: (-padded_length(lengths[row], 8), _position(row)))
    naive: list[list[int]] = []
    for row in rows:
        rooms = [1024 - sum(padded_length(lengths[other], 8) for other in pack) for pack in naive]
        fitting = [room for room in rooms if room >= padded_length(lengths[row], 8)]
        if fitting:
            naive[rooms.index(min(fitting))].append(row)
        else:
            naive.append([row])
    packs = plan_packs(lengths, seed=5, epoch=2, packing_length=1024, pack_align=8)
    sizes, naive_sizes = ([sum(padded_length(lengths[row], 8) for row in pack) for pack in some] for some in (packs, naive))
    assert sorted(sizes) == sorted(naive_sizes)


def _position(row: int) -> int:
    order = list(range(300))
    random.Random("rows 5 2").shuffle(order)
    return order.index(row)


def test_packs_are_well_filled() -> None:
    steps = plan(lengths_like_real(20_000), packing_length=8192, pack_align=64)
    assert steps.fill() > 0.93  # what padding to 64 leaves of 0.99
    assert plan(lengths_like_real(20_000), packing_length=8192, pack_align=1).fill() > 0.99


def test_planning_is_fast() -> None:
    lengths = lengths_like_real(100_000)
    begin = time.perf_counter()
    plan_packs(lengths, seed=0, epoch=0, packing_length=32768, pack_align=64)
    assert time.perf_counter() - begin < 10


def test_literal_packs() -> None:
    packs = plan_packs([10, 20, 30, 33, 64], seed=0, epoch=0, packing_length=64, pack_align=8)
    assert sorted(tuple(sorted(pack)) for pack in packs) == [(0, 2), (1, 3), (4,)]


def test_row_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"a row of 61 tokens, padded to pack_align 8, does not fit packing_length 60: .* at least 64"):
        plan_packs([3, 61], seed=0, epoch=0, packing_length=60, pack_align=8)


def test_seed_and_epoch_shuffle() -> None:
    orders = {tuple(plan_rows(50, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    packs = {tuple(plan_packs([9] * 50, seed=seed, epoch=epoch, packing_length=64, pack_align=8)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(packs) == 4


def test_case_23_other_processes_plan_the_same() -> None:
    code = (
        "from swiftcp.data.plan import StepPlan; steps = StepPlan([(7 * i) % 60 + 1 for i in range(500)], seed=3, global_batch_size=4,"
        " packing_length=64, pack_align=8, num_train_epochs=2); print(steps.plan_hash(), steps.step(9))"
    )
    command = [sys.executable, "-c", f"import random; random.seed(9); {code}"]
    steps = plan([(7 * i) % 60 + 1 for i in range(500)], seed=3, num_train_epochs=2)
    for hash_seed in ("0", "1"):
        printed = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": "."})
        assert printed.stdout.strip() == f"{steps.plan_hash()} {steps.step(9)}"


def test_plan_hash_depends_on_all_that_matters() -> None:
    lengths = [5, 9, 30, 41]
    variants: list[dict[str, Any]] = [
        {},
        {"seed": 2},
        {"global_batch_size": 2},
        {"packing_length": 128},
        {"packing_length": None},
        {"pack_align": 16},
        {"num_train_epochs": 2},
    ]
    hashes = {plan(lengths, **variant).plan_hash() for variant in variants}
    assert len(hashes | {plan([5, 9, 30, 40]).plan_hash()}) == 8


@pytest.mark.parametrize("packing_length", [None, 64])
@pytest.mark.parametrize("global_batch_size", [1, 4, 64])
def test_every_row_once_an_epoch(packing_length: int | None, global_batch_size: int) -> None:
    lengths = [(7 * i) % 60 + 1 for i in range(101)]
    steps = plan(lengths, packing_length=packing_length, global_batch_size=global_batch_size, num_train_epochs=3)
    packs = all_packs(steps)
    assert len(packs) == steps.num_steps * global_batch_size
    assert Counter(row for pack in packs for row in pack) == Counter(dict.fromkeys(range(101), 3))
    num_fillers = packs.count(FILLER)
    assert num_fillers < global_batch_size and packs[len(packs) - num_fillers :] == [FILLER] * num_fillers
    stream = [row for pack in packs for row in pack]
    assert all(sorted(stream[begin : begin + 101]) == list(range(101)) for begin in (0, 101, 202))


def test_train_iters_go_round_as_often_as_they_need() -> None:
    steps = plan([9] * 5, packing_length=None, num_train_epochs=None, train_iters=6, global_batch_size=4)
    packs = all_packs(steps)
    assert steps.num_steps == 6 and len(packs) == 24 and FILLER not in packs
    assert all(sorted(pack[0] for pack in packs[begin : begin + 5]) == list(range(5)) for begin in (0, 5, 10, 15))
    assert packs[:5] != packs[5:10]


def test_case_36_data_smaller_than_a_step() -> None:
    once = plan([9, 9, 9], packing_length=None, global_batch_size=8)
    assert once.num_steps == 1 and once.step(0).count(FILLER) == 5
    forever = plan([9, 9, 9], packing_length=None, global_batch_size=8, num_train_epochs=None, train_iters=2)
    assert sorted(Counter(row for pack in forever.step(0) for row in pack).values()) == [2, 3, 3]


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 1), (2, 1), (4, 1), (1, 4), (3, 2), (12, 1)])
def test_case_36_a_step_holds_the_same_packs_under_any_layout(dp_size: int, micro_batch_size: int) -> None:
    steps = plan([9] * 23, packing_length=None, global_batch_size=12)
    for step in range(steps.num_steps):
        ranks = [
            packs_of_rank(steps.step(step), dp_rank=rank, dp_size=dp_size, micro_batch_size=micro_batch_size) for rank in range(dp_size)
        ]
        assert {len(micro_batches) for micro_batches in ranks} == {12 // (dp_size * micro_batch_size)}
        in_turn = [pack for together in zip(*ranks, strict=True) for micro_batch in together for pack in micro_batch]
        assert in_turn == steps.step(step)


def test_case_36_eleven_rows_on_three_ranks() -> None:
    steps = plan([9] * 11, packing_length=None, global_batch_size=6)
    ranks = [[packs_of_rank(steps.step(step), dp_rank=rank, dp_size=3, micro_batch_size=2) for step in range(2)] for rank in range(3)]
    assert [[len(step) for step in rank] for rank in ranks] == [[1, 1]] * 3
    rows = sorted(row for rank in ranks for step in rank for micro_batch in step for pack in micro_batch for row in pack)
    assert rows == list(range(11))


def test_steps_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size 8 is no multiple of dp 3 x micro_batch_size 2 = 6: set 12"):
        packs_of_rank([FILLER] * 8, dp_rank=0, dp_size=3, micro_batch_size=2)


def test_steps_can_be_asked_for_in_any_order() -> None:
    lengths = [(7 * i) % 60 + 1 for i in range(40)]
    forwards = plan(lengths, num_train_epochs=5)
    expected = [forwards.step(step) for step in range(forwards.num_steps)]
    again = plan(lengths, num_train_epochs=5)
    assert [again.step(step) for step in reversed(range(again.num_steps))] == expected[::-1]


def test_threads_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftcp.data.plan._WINDOW", 8)  # so that epochs differ in their number of packs
    lengths = [(7 * i) % 60 + 1 for i in range(40)]
    options = {"num_train_epochs": None, "train_iters": 40}
    alone = plan(lengths, **options)
    expected = [(alone.epochs_before(step), alone.step(step)) for step in range(alone.num_steps)]

    def slow(*arguments: Any, **named: Any) -> list[Pack]:
        time.sleep(0.01)  # so that threads meet here
        return plan_packs(*arguments, **named)

    monkeypatch.setattr("swiftcp.data.plan.plan_packs", slow)
    shared = plan(lengths, **options)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(lambda: [(shared.epochs_before(s), shared.step(s)) for s in range(shared.num_steps)]) for _ in range(4)]
    assert all(answers.result() == expected for answers in asked)


def test_epochs_before_a_step() -> None:
    steps = plan([9] * 6, packing_length=None, global_batch_size=4, num_train_epochs=2)
    assert [steps.epochs_before(step) for step in range(4)] == [0.0, pytest.approx(4 / 6), pytest.approx(1 + 2 / 6), 2.0]


def test_steps_that_are_not_there() -> None:
    steps = plan([9])
    for step in (-1, 1):
        with pytest.raises(IndexError):
            steps.step(step)


def test_settings_that_contradict() -> None:
    with pytest.raises(ConfigError, match="no rows"):
        plan([])
    for options in ({"train_iters": 3}, {"num_train_epochs": None}):
        with pytest.raises(ConfigError, match="either num_train_epochs or train_iters"):
            plan([9], **options)


def test_in_order() -> None:
    lengths = [10, 20, 60, 8, 9, 40]
    assert plan_in_order(lengths, packing_length=64, pack_align=8) == [(0, 1), (2,), (3, 4, 5)]
    assert plan_in_order(lengths, packing_length=None, pack_align=8) == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert plan_in_order([], packing_length=64, pack_align=8) == []


def shares(packs: list[Pack], dp_size: int, micro_batch_size: int = 1) -> list[list[tuple[Pack, ...]]]:
    return [packs_of_rank(packs, dp_rank=rank, dp_size=dp_size, micro_batch_size=micro_batch_size) for rank in range(dp_size)]


def test_ranks_get_packs_of_like_cost() -> None:
    """In each round neighbours in cost, the costliest for the rank with the least so far; fillers last."""
    lengths = [100, 400, 300, 200]
    packs: list[Pack] = [(0,), (1,), FILLER, (2,), (3,), FILLER]
    order = balanced(packs, lengths, dp_size=2, micro_batch_size=1)
    assert shares(order, 2) == [[((1,),), ((0,),), (FILLER,)], [((2,),), ((3,),), (FILLER,)]]
    assert balanced(packs, lengths, dp_size=1, micro_batch_size=1) == packs


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_balance_keeps_the_micro_batches_of_a_step_and_evens_out_their_cost(micro_batch_size: int) -> None:
    lengths = lengths_like_real(2000, longest=32_768)
    steps = plan(lengths, packing_length=32_768, pack_align=64, global_batch_size=24)
    worst_before = worst_after = 0.0
    for step in range(steps.num_steps):
        packs = steps.step(step)
        order = balanced(packs, lengths, dp_size=4, micro_batch_size=micro_batch_size)
        before, after = (shares(which, 4, micro_batch_size) for which in (packs, order))
        assert sorted(own for rank in before for own in rank) == sorted(own for rank in after for own in rank)
        worst_before, worst_after = (
            worst + max(sum(pack_cost(pack, lengths) for own in rank for pack in own) for rank in ranks)
            for worst, ranks in ((worst_before, before), (worst_after, after))
        )
    assert worst_after < worst_before
