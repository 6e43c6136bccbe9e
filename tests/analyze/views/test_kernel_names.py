"""Short names of kernels: readable, told apart, whatever the name is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.views.kernels import short_names
from tests.analyze import shared_traces

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


@shared_traces.needs_traces
@pytest.mark.parametrize(
    "name", ["hta/trace_filter/sampled_rank-0.json.gz", "tracelens/inference/vllm_decode_full/graph_execution.json.gz"]
)
def test_kernels_of_real_traces_get_names_of_their_own(name: str) -> None:
    events = shared_traces.run_of(name).tables.events
    names = [each for each in events.filter(events["category"] == "kernel")["name"].unique().to_list() if each]
    found = short_names(names)
    assert len(set(found)) == len(names) > 20
    assert max(map(len, found)) <= 104
