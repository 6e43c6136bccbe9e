"""Lists of nodes as SLURM writes them."""

from __future__ import annotations

import pytest

from stepscope.record.host.scheduler import MOST_NODES, nodes_of


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("login1", ("login1",)),
        ("node[01-03,7]", ("node01", "node02", "node03", "node7")),
        ("a[1-2],b,c[009-011]-ib", ("a1", "a2", "b", "c009-ib", "c010-ib", "c011-ib")),
        ("r[1-2]n[1,3]", ("r1n1", "r1n3", "r2n1", "r2n3")),
        ("traverse-k01g[2-3]", ("traverse-k01g2", "traverse-k01g3")),
        ("n[098-101]", ("n098", "n099", "n100", "n101")),
    ],
)
def test_lists_are_nodes_of(text: str, names: tuple[str, ...]) -> None:
    assert nodes_of(text) == names


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n[",
        "n[3-1]",
        "n[a-b]",
        "n[1-2",
        "n]1[",
        "n[]",
        "n[1,]",
        "a,,b",
        "n[1-2]]",
        "n[[1-2]]",
        "a b",
        "n;rm",
        "(null)",
    ],
)
def test_what_is_no_list_has_no_names(text: str) -> None:
    assert nodes_of(text) == ()


@pytest.mark.parametrize("text", ["n[1-999999999]", "n[1-999]m[1-999]k[1-999]", "n[0-19999],m"])
def test_lists_are_bounded(text: str) -> None:
    assert nodes_of(text) == ()
    assert len(nodes_of(f"n[1-{MOST_NODES}]")) == MOST_NODES
