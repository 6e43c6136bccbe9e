"""What shapes tell: how much of a product fills up tiles, and which batch the layers got."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.analyze.device.kernels import MULTIPLE, waste
from tests.analyze.device_scenes import Scene, short_launches

TILED = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_tn"
SIZES = st.integers(1, 5000)


@pytest.mark.parametrize(
    ("size", "kernel", "expected"),
    [
        ((128, 64, 64), TILED, 0.0),
        ((64, 128, 64), TILED, 0.0),  # the tile may stand either way
        ((129, 64, 64), TILED, 1 - 129 / 256),  # across, 64 columns would fill up 128
        ((50257, 4096, 768), "gemm_without_a_tile", 1 - 50257 / 50264),
        ((141, 512, 512), "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warp", 1 - 141 / 192),
        ((64, 64, 64), "Cijk_Alik_Bljk_BBS_BH_MT32x32x256_MI16x16x1_SN_", 0.0),
    ],
)
def test_what_a_kernel_fills_up(size: tuple[int, int, int], kernel: str, expected: float) -> None:
    assert waste(size, kernel) == pytest.approx(expected)


@given(rows=SIZES, columns=SIZES, depth=SIZES, kernel=st.sampled_from([TILED, "gemm", "x" * 5000]))
def test_the_waste_is_a_part_and_nothing_for_whole_tiles(rows: int, columns: int, depth: int, kernel: str) -> None:
    assert 0 <= waste((rows, columns, depth), kernel) < 1
    assert waste((128 * rows, 128 * columns, MULTIPLE * depth), kernel) == 0


def batch(*shapes: str, op: str = "aten::linear") -> int | None:
    scene = Scene()
    scene.step(1000)
    short_launches(scene)
    for number, text in enumerate(shapes):
        scene.op(op, 900 + number, 0.5, shapes=text)
    return analyze(scene.tables()).device_losses[0].batch_size


def test_no_batch_is_told_where_layers_disagree_or_are_flat() -> None:
    assert batch("[[8, 16, 4], [4, 4]]", "[[16, 8, 4], [4, 4]]") is None
    assert batch("[[128, 4], [4, 4]]") is None
    assert batch("not json", "[1, 2]", "[[]]") is None
    assert batch() is None
