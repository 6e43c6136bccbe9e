"""Which kernels use tensor cores and which operators could, told by names as libraries really write them."""

from __future__ import annotations

import pytest

from stepscope.analyze.views.kernels import uses_tensor_cores as uses

TENSILE = "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_{}_SN_LDSB1_AFC1_ISA942_WG32_8_1"
WITH = {
    "volta": ["volta_fp16_s884gemm_fp16_128x64_ldg8_f2f_nn", "volta_h884gemm_64x64_ldg8_nn"],
    "turing": [
        "turing_fp16_s1688cudnn_fp16_128x128_ldg8_relu_f2f_exp_small_nhwc_tn_v1",
        "turing_h1688gemm_256x64_ldg8_tn",
    ],
    "int8": ["volta_int8x4_i8816gemm_int8x4_128x128_ldg16_nt", "ampere_i16832gemm_int8_128x128_ldg16_stages_32x3_tn"],
    "ampere": [
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
        "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>(cutlass_80_tensorop::Params)",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_128x2_tn_align8>(x::Params)",
        "sm80_xmma_wgrad_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x64x64_stage4_g1_tensor16x8x8",
        "sm80_xmma_gemm_f64f64_f64f64_f64_nn_n_tilesize64x64x16_stage4_tensor8x8x4_execute_kernel",
    ],
    "hopper": [
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>, "
        "cutlass::gemm::collective::CollectiveMma<cutlass::gemm::MainloopSm90TmaGmmaWarpSpecialized<5>, float> > >(x)",
        "cutlass3x_sm90_tensorop_s64x128x16gemm_bf16_bf16_f32_void_bf16_128x128x64_2x1x1_0_tnn_align8_warpspecialized",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u>(float*)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
    ],
    "blackwell": [
        "nvjet_tst_64x64_64x16_2x1_2cta_v_bz_bias_TNT",
        "nvjet_sm100_tst_mma_128x192x64_5_32x192x64_cta_2x1_bz_TNN",
        "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3_et128x16_schedP2x1x2x3_dynBatch_sm100f",
        "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausalP16VarSeqQ128Kv128PersistentContext",
        "cutlass3x_sm100_tensorop_gemm_e4m3_e4m3_f32",
        "void my_kernel_tcgen05_mma(float*)",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4> >(x)",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64> >(x)",
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128> >(x)",
        "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::X<2> > > >",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)",
        "fmha_cutlassB_f16_aligned_64x64_k64_sm70(x)",
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
    "ampere_sgemm_64x64_nn",
    "volta_scudnn_128x64_relu_interior_nn_v1",
    "void implicit_convolve_sgemm<float, float, 1024, 6, 7, 3, 3, 5, 1, false, true, true>(int)",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(x::Params)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, Array<char*> >(int)",
    "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<float, float>(long)",
    "triton_poi_fused_conv1x1_gemm_hmma_0",
    "triton_red_fused_native_layer_norm_1",
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


def test_a_name_of_any_length_is_read() -> None:
    assert uses(["sm90_gemm" * 100_000, "x" * 100_000]) == [False, False]
