"""The kernel table: durations, weights, launches, who launched them; and the TensorBoard plugin's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope import api
from stepscope.analyze.views import kernels
from stepscope.analyze.views.kernels import short_names
from stepscope.analyze.views.kernels import uses_tensor_cores as uses
from tests import gpu_traces
from tests.analyze.traces import US, Nested, base_of, tables


def kernel(trace: Nested, number: int, **columns: Any) -> None:
    trace.events[number].update(columns)


def test_several_devices_and_spans() -> None:
    made = []
    for rank in range(2):
        trace = Nested(rank=rank, trace=f"worker{rank}.pt.trace.json")
        kernel(trace, trace.kernel(0, 10 + rank, "gemm"), device=rank)
        made.append(trace)
    base = base_of(tables(*made))
    (row,) = kernels.table(base)
    assert (row.calls, row.device, row.max_ns) == (2, None, 11 * US)
    (alone,) = kernels.table(base, span=base.spans[1].ref)
    assert (alone.calls, alone.device, alone.share) == (1, 1, 1)
    (chosen,) = kernels.table(base, device=0)
    assert (chosen.calls, chosen.max_ns) == (1, 10 * US)
    assert kernels.table(base, device=5) == ()


H200 = {
    "name": "NVIDIA H200",
    "computeMajor": 9,
    "numSms": 132,
    "regsPerMultiprocessor": 65536,
    "sharedMemPerMultiprocessor": 233472,
}
# Launches: blocks, threads, registers, shared memory, Kineto's percent, expected percent.
LAUNCHES = {
    "sm80_xmma_gemm": (512, 256, 254, 67584, 0, 12.5),  # registers are for one block
    "sm90_xmma_gemm": (120, 384, 168, 231424, 0, 100 * 120 / 132 * 12 / 64),  # 12 of the multiprocessors have none
    "nvjet": (132, 384, 168, 188604, 0, 18.75),
    "three_blocks": (9999, 128, 32, 57 * 1024, 0, 18.75),  # four but for what each reserves
    "most_blocks": (9999, 32, 16, 0, None, 50),
    "granules": (9999, 64, 200, 0, None, 12.5),  # a quarter has registers for two warps, not two and a half
    "tiny": (1, 128, 16, 0, 0, 0),  # 0.05 %, which Kineto rounds
    "writers_own": (132, 384, 168, 188604, 7, 7),
    "no_registers": (132, 384, None, 188604, 0, None),
    "too_many": (132, 1024, 255, 188604, 0, None),  # of registers for any block: not what ran
}


def occupancies(path: Path, properties: dict[str, Any]) -> dict[str, float | None]:
    more = []
    for number, (name, (blocks, threads, registers, shared, written, _)) in enumerate(LAUNCHES.items()):
        one = gpu_traces.kernel(name, 1300 + 50 * number, 10, 100 + number)
        one["args"] |= {"grid": [blocks, 1, 1], "block": [threads, 1, 1], "registers per thread": registers}
        one["args"] |= {"shared memory": shared, "est. achieved occupancy %": written}
        more.append(one)
    file = gpu_traces.write(path / "a.pt.trace.json", more=more, properties=properties)
    run = api.open_run(file, options=api.ReadOptions(cache=False))
    found = {row.name: row.occupancy_pct for row in kernels.table(base_of(run.tables))}
    return {name: found[name] for name in LAUNCHES}


def test_an_occupancy_that_the_writer_could_not_make(tmp_path: Path) -> None:
    assert occupancies(tmp_path, H200) == pytest.approx({name: launch[-1] for name, launch in LAUNCHES.items()})


@pytest.mark.parametrize(
    "properties", [{}, {**H200, "computeMajor": 6}, {**H200, "name": "AMD Radeon"}, {**H200, "warpSize": 64}]
)
def test_no_occupancy_without_the_rules_of_the_device(tmp_path: Path, properties: dict[str, Any]) -> None:
    found = occupancies(tmp_path, properties)
    assert {name for name, pct in found.items() if pct is not None} == {"writers_own"}


LAMBDA = "::{lambda()#1}::operator()() const::{lambda(float, float)#1}"


def short(name: str) -> str:
    return short_names([name])[0]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("volta_sgemm_128x32_nt", "volta_sgemm_128x32_nt"),
        ("triton_poi_fused_add_cos_sin_0", "triton_poi_fused_add_cos_sin_0"),
        ("nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT", "nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT"),
        (
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
            "at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>)",
            "vectorized_elementwise_kernel<CUDAFunctor_add>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::BinaryFunctor<c10::BFloat16, c10::BFloat16, "
            "c10::BFloat16, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 3ul> >(int)",
            "vectorized_elementwise_kernel<MulFunctor>",
        ),
        (
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
            "at::native::sum_functor<float, float, float>::operator()(at::TensorIterator&)"
            f"{LAMBDA[14:]}>, unsigned int> >(x)",
            "reduce_kernel<sum_functor>",
        ),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::mse_kernel_cuda(at::TensorIteratorBase&)"
            f"{LAMBDA}, "
            "at::detail::Array<char*, 3> >(int)",
            "vectorized_elementwise_kernel<mse_kernel_cuda>",
        ),
        (
            "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(x::Params)",
            "cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4",
        ),
        ("void epilogue::impl::globalKernel<float, float, float, true, true>(int, int)", "globalKernel"),
        (
            "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<c10::BFloat16>::exists, void>::type "
            "vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, long)",
            "fused_add_rms_norm_kernel",
        ),
        (
            "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x128x32_stage5_warpsize2x2x1_g1",
            "sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc 64x128x32",
        ),
        (
            "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT32x32x256_MI16x16x1_SN_LDSB1_AFC1_WG32_8_1",
            "Cijk_Alik_Bljk_BBS MT32x32x256",
        ),
        # mangled still, because the types are newer than the profiler's demangler
        (
            "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi256ELi16ELb0ELb0ELb1ELi1EEEvPT0_PT_PfS4_S4_S4_diiiiiiib",
            "add_rmsnorm_quant_kernel",
        ),
        (
            "_ZN7sgl_hip10activation18act_and_mul_kernelI14__hip_bfloat16TnPFT_RKS3_EXadL_Z4siluIS2_ES3_S5_EEEEvPS3_PS4_i",
            "act_and_mul_kernel",
        ),
        (
            "_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOnePassINS_7ProblemIDF16bDF16bfEEEEEEvDpT1_",
            "Rmsnorm2dFwd",
        ),
        (
            "_ZN19cutlass_cudnn_train6KernelINS_4conv6kernel23ImplicitGemmConvolutionINS1_11threadblock3MmaEEEEEvNT_6ParamsE",
            "ImplicitGemmConvolution",
        ),
        ("_ZNSt6vectorIfE4pushEv", "vector"),
        ("", ""),
    ],
)
def test_a_name_alone(name: str, expected: str) -> None:
    assert short(name) == expected


TYPES = st.recursive(
    st.sampled_from(
        ["float", "int", "4", "true", "at::Half", "ns::Functor", "a::b(int)::{lambda()#1}", "(E)2", "(x)>(0)"]
    ),
    lambda inner: st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"ns::T<{', '.join(parts)} >"),
    max_leaves=12,
)
KERNELS = st.builds(
    lambda spaces, name, types, end: f"void {spaces}{name}<{', '.join(types)}>({end})",
    st.sampled_from(["", "at::native::", "(anonymous namespace)::"]),
    st.sampled_from(["elementwise_kernel", "reduce_kernel", "Kernel", "own"]),
    st.lists(TYPES, min_size=1, max_size=4),
    st.sampled_from(["", "int", "at::Tensor const&, int"]),
)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.one_of(KERNELS, st.text(max_size=60), st.text("_ZNSIELbi0123456789abX", max_size=60)),
        unique=True,
        max_size=12,
    )
)
def test_no_two_kernels_share_a_name_and_names_are_short(names: list[str]) -> None:
    found = short_names(names)
    assert len(found) == len(set(found)) == len(names)
    assert all(len(name) <= 104 for name in found)


@pytest.mark.parametrize(
    "name",
    [
        "a" * 1_000_000,
        "_ZN" + "9" * 500_000,
        "_ZN" + "3abc" * 100_000,
        "void f<" + "(" * 300_000,
        "f<" + "a<" * 99_999,
        "a::" * 99_999,
    ],
)
def test_crafted_names_are_read_like_others(name: str) -> None:
    assert len(short(name)) <= 100


TENSILE = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_{}_SN_LDSB1_AFC1_ISA942_WG32_8_1"
WITH = {
    "volta": ["volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_nn"],
    "turing": [
        "turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1",
    ],
    "int8": ["volta_int8x4_i8816gemm_int8x4_128x128_ldg16_nt", "ampere_i16832gemm_int8_128x128_ldg16_stages_32x3_tn"],
    "ampere": [
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
        "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(cutlass_80_tensorop::Params)",
        "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x64x64_stage4_g1_tensor16x8x8",
        "sm80_xmma_gemm_f64f64_f64f64_f64_nn_n_tilesize64x64x16_stage4_tensor8x8x4_execute_kernel",
    ],
    "hopper": [
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, "
        "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<5>, float> > >(x)",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u>(float*)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
    ],
    "blackwell": [
        "nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT",
        "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_schedP2x1x2x3_dynBatch_sm100f",
        "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext",
        "void my_kernel_tcgen05_mma(float*)",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4> >(x)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64> >(x)",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::X<2> > > >",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)",
    ],
    "triton": [
        "triton_tem_fused_addmm_relu_3",
        "attn_fwd",
        "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1",
        "fused_moe_kernel",
    ],
    "amd": [
        TENSILE.format("MI16x16x1"),
        "_ZN2ck16tensor_operation6device12_GLOBAL__N_137kernel_grouped_conv_fwd_xdl_cshuffle",
        "igemm_fwd_gtcx3_nhwc_fp16_bx0_ex1_bt256x128x32_wt32x32x8",
        "void ck_tile::kentry<1, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipeline> >(x)",
        "_ZN7ck_tile6kentryILi1ENS_13FmhaFwdKernelINS_9SomethingE",
        "void paged_attention_ll4mi_QKV_mfma16_kernel<__hip_bfloat16>(x)",
        "_ZN5aiter30fmha_fwd_hd128_bf16_causal_groupE",
    ],
}
WITHOUT = [
    "volta_sgemm_128x32_nt",
    "volta_scudnn_128x64_relu_interior_nn_v1",
    "void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false, true, true>(int)",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(x::Params)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, Array<char*> >(int)",
    "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>(long)",
    "triton_poi_fused_conv1x1_gemm_hmma_0",
    "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64> >(x)",
    "void pytorch_flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128> >(x)",
    "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(x)",
    "fmha_cutlassF_f32_aligned_64x64_rf_sm75(x)",
    "void splitKreduce_kernel<32, 16, int, float>(cublasSplitKParams<float>)",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    TENSILE.format("TT8_8"),
    "_ZN7ck_tile6kentryILi1ENS_12Rmsnorm2dFwdINS_27Rmsnorm2dFwdPipelineOnePassE",
    "_finalize_matmul_scatter_bf16",
    "",
]


@pytest.mark.parametrize("name", [name for names in WITH.values() for name in names])
def test_matrix_kernels_of_every_generation_count(name: str) -> None:
    assert uses([name]) == [True]


@pytest.mark.parametrize("name", WITHOUT)
def test_other_kernels_do_not_count(name: str) -> None:
    assert uses([name]) == [False]
