"""Clocks of hosts by the ends of collectives: what was planted is found within the stated bound, or not claimed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.clocks import Clocks, Members, Piece, estimate
from tests.analyze.planted_clocks import KINDS, LARGE, SMALL, START_NS, Hosts
from tests.records import some

US, MS = 1e3, 1e6


def of(clocks: Clocks, host: int, window: int = 0) -> Piece:
    """The piece of a host in a window, where it is one."""
    (piece,) = (piece for piece in clocks.pieces if (piece.host, piece.window) == (host, window))
    return piece


def others(clocks: Clocks) -> list[Piece]:
    return [piece for piece in clocks.pieces if piece.host != clocks.reference[piece.window]]


@given(
    hosts=st.integers(2, 8),
    per_host=st.integers(2, 8),
    seed=st.integers(0, 10**6),
    offset_ns=st.sampled_from([0.0, 1e5, 5e7, 3.6e12]),
    missing=st.sampled_from([0.0, 0.1, 0.3]),
)
@settings(max_examples=40, deadline=None)
def test_offsets_and_rates_are_found_within_their_bounds(
    hosts: int, per_host: int, seed: int, offset_ns: float, missing: float
) -> None:
    made = Hosts(hosts, per_host, seed=seed, offset_ns=offset_ns).window(steps=30)
    gone = np.random.default_rng(seed).random(len(made.rank)) < missing
    clocks = estimate(made.members(lambda table: ~gone[table["rank"]]), made.names)
    there = {int(host) for host in made.host[~gone]}
    if len(there) < 2:
        return
    assert {piece.host for piece in clocks.pieces} == there
    reference = clocks.reference[0]
    assert of(clocks, reference).offset_ns == 0
    for piece in others(clocks):
        assert piece.claimed, piece.reason
        assert piece.bound_ns is not None
        error = abs(made.error(clocks, piece))
        assert error <= min(piece.bound_ns, 60 * US)
        assert piece.bound_ns <= 400 * US
        rate_error = abs(piece.rate_ppm - 1e6 * (made.rate[piece.host] - made.rate[reference]))
        assert rate_error <= piece.rate_bound_ppm


@pytest.mark.parametrize("hosts", [2, 8])
@pytest.mark.parametrize("by_ns", [5e6, -5e6])
def test_a_step_in_a_window_is_found_and_dated(hosts: int, by_ns: float) -> None:
    made = Hosts(hosts, 4, seed=3)
    made.steps.append((1, 11.5e9, by_ns))
    clocks = estimate(made.window().members(), made.names)
    before, after = (piece for piece in clocks.pieces if piece.host == 1)
    assert after.step_ns == pytest.approx(by_ns, abs=200 * US)
    assert abs(some(after.step) - 11.5) <= 1
    assert f"its clock stepped by {'+' if by_ns > 0 else '-'}" in after.reason
    for piece in others(clocks):
        assert abs(made.error(clocks, piece)) <= some(piece.bound_ns)
    assert not before.reason
    assert len(clocks.pieces) == hosts + 1


def test_a_step_between_windows_is_told_with_the_window_after_it() -> None:
    made = Hosts(4, 4, seed=4)
    made.steps.append((2, 60e9, 5e6))
    for window in range(3):
        made.window(window, at_s=40.0 * window)
    clocks = estimate(made.members(), made.names)
    assert of(clocks, 2, 2).step_ns == pytest.approx(5e6, abs=300 * US)
    assert [piece.host for piece in clocks.pieces if piece.reason] == [2]


@pytest.mark.parametrize(("from_s", "to_s", "ppm"), [(8, 14, 500), (13, 25, -200)])
def test_a_slew_in_a_window_is_a_change_of_the_rate(from_s: int, to_s: int, ppm: float) -> None:
    made = Hosts(4, 4, seed=6)
    made.steps += [(3, at_ns, ppm * 1e2) for at_ns in np.arange(from_s * 1e9, to_s * 1e9, 1e8)]
    clocks = estimate(made.window().members(), made.names)
    pieces = [piece for piece in clocks.pieces if piece.host == 3]
    assert len(pieces) > 1
    assert any("rate of its clock changed" in piece.reason for piece in pieces)
    assert max(abs(piece.rate_ppm) for piece in pieces) > 0.7 * abs(ppm)
    for piece in others(clocks):
        assert abs(made.error(clocks, piece)) <= some(piece.bound_ns)


def test_one_rank_and_one_kind_of_collective_are_bounded_by_order() -> None:
    """Nothing tells them from work; that nobody leaves before the last has come holds of them, too."""
    made = Hosts(3, 1, seed=11)
    for step in range(20):
        made.call((step + 0.5) * 1e9, work_ns=lambda rank: 2e6 * (rank == 2))
    clocks = estimate(made.members(), made.names)
    late = of(clocks, 2)
    assert abs(made.error(clocks, late)) <= some(late.bound_ns)
    assert "one rank and one kind" in late.reason


def test_hosts_that_nothing_connects_are_named() -> None:
    made = Hosts(4, 2, seed=13)
    for step in range(20):
        for pair in (range(4), range(4, 8)):
            for kind in ("all_reduce", "all_gather"):
                made.call((step + 0.5) * 1e9, kind, ranks=pair, group=pair.start)
        made.call((step + 0.7) * 1e9, "broadcast")  # whose root nothing tells
    clocks = estimate(made.members(), made.names)
    assert of(clocks, 1).claimed
    for host in (2, 3):
        piece = of(clocks, host)
        assert piece.offset_ns is None
        assert "connects it with the reference" in piece.reason
        assert all(np.isnan(clocks.ahead(host, np.array([piece.middle_ns]))[0]))


def test_messages_to_and_fro_bound_what_collectives_do_not_connect() -> None:
    made = Hosts(4, 2, seed=14)
    made.rate[:] = 0
    for step in range(20):
        for pair in (range(4), range(4, 8)):
            for kind in ("all_reduce", "all_gather"):
                made.call((step + 0.5) * 1e9, kind, ranks=pair, group=pair.start)
        for kinds in (("send", "recv"), ("recv", "send")):
            sent = (step + 0.6 + 0.1 * (kinds[0] == "recv")) * 1e9
            start = np.array([sent, sent]) - made.rng.uniform(0, 1e6, 2)
            made.add(np.array([1, 4]), start, start.max() + np.array([2e5, 2e5]), kinds, LARGE, window=0, group=9)
    clocks = estimate(made.members(), made.names)
    for host in (2, 3):
        piece = of(clocks, host)
        assert not piece.claimed
        assert abs(made.error(clocks, piece)) <= some(piece.bound_ns) < 10 * MS


@pytest.mark.parametrize("hosts", [2, 6])
def test_mismatched_data_are_refused(hosts: int) -> None:
    made = Hosts(hosts, 4, seed=15).window()
    members = made.members()
    mixed = members.host == 1
    call = members.call.copy()
    call[mixed] = made.rng.permutation(made.calls)[call[mixed]]
    clocks = estimate(
        Members(**{name: getattr(members, name) for name in members.__struct_fields__} | {"call": call}), made.names
    )
    refused = of(clocks, 1)
    assert refused.offset_ns is None
    assert "mismatched data" in refused.reason
    if hosts > 2:
        assert [piece.host for piece in clocks.pieces if piece.claimed] == [0, 2, 3, 4, 5]


def test_a_bound_grows_beyond_what_was_recorded() -> None:
    made = Hosts(2, 4, seed=17).window()
    clocks = estimate(made.members(), made.names)
    piece = of(clocks, 1)
    times = np.array([piece.middle_ns, piece.end_ns, piece.end_ns + 10**9, piece.start_ns - 10**10])
    offset, bound = clocks.ahead(1, times)
    true = times - START_NS - made.offset[1]
    error = np.abs(offset - made.ahead(1, true) + made.ahead(0, true))
    assert (error <= bound).all()
    assert bound[2] > bound[1] + 400 * US
    assert bound[3] > 4 * MS
    assert clocks.ahead(0, times)[0].tolist() == [0.0] * 4


def test_damaged_members_are_passed_over() -> None:
    made = Hosts(3, 4, seed=19).window()
    good = made.members()
    fields: dict[str, Any] = {name: getattr(good, name) for name in good.__struct_fields__ if name != "kinds"}
    odd = {
        "host": [99, -1, 0, 0, 1, 1, 2], "start_ns": [1, 1, -5, 2**62, 0, 10, START_NS],
        "end_ns": [2, 2, 10, -(2**62), 2**62, 5, 2**63 - 1],
    }  # fmt: skip
    more = {name: np.array(odd.get(name, [0] * 7)).astype(values.dtype) for name, values in fields.items()}
    damaged = Members(**{name: np.concatenate([fields[name], more[name]]) for name in fields}, kinds=good.kinds)
    assert estimate(damaged, made.names) == estimate(good, made.names)
    nothing = estimate(good.at(np.zeros(len(good.call), bool)), made.names)
    assert nothing.pieces == ()
    assert estimate(good.at(np.arange(1)), made.names).pieces[0].offset_ns == 0


def test_small_is_told_by_bytes_or_by_the_stay() -> None:
    for size, claimed in ((SMALL, True), (-1, True), (LARGE, False)):
        made = Hosts(3, 4, seed=21)
        for step in range(20):
            made.call((step + 0.5) * 1e9, size=size)
            made.call((step + 0.7) * 1e9, "all_gather", size)
        pieces = others(estimate(made.members(), made.names))
        assert [piece.claimed for piece in pieces] == [claimed] * 2


@given(seed=st.integers(0, 10**6), count=st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_no_numbers_are_too_odd(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)

    def any_of(low: int, high: int) -> Any:
        return rng.integers(low, high, count)

    start = int(rng.choice([1, 10**18, 2**61])) + any_of(-10, 10 ** int(rng.integers(1, 17)))
    odd = rng.random(count) < 0.1
    start[odd] = rng.choice([0, -(2**62), 2**62, 2**63 - 1], int(odd.sum()))
    end = np.minimum(start, 2**62) + any_of(-2, 10 ** int(rng.integers(1, 10)))
    members = Members(
        host=any_of(-1, 5), rank=any_of(0, 8), window=any_of(0, 3), step=any_of(-1, 9), call=any_of(0, 12),
        group=any_of(0, 3), kind=any_of(0, len(KINDS)), bytes=any_of(-1, 2**21), start_ns=start, end_ns=end,
        on_device=rng.random(count) < 0.7, kinds=KINDS,
    )  # fmt: skip
    clocks = estimate(members, ("a", "b", "c", "d"))
    for piece in clocks.pieces:
        assert piece.reason or piece.offset_ns is not None
    for host in range(4):
        offset, bound = clocks.ahead(host, np.array([1, 2**61]))
        assert (np.isnan(offset) == np.isnan(bound)).all()
        assert not (bound < 0).any()
