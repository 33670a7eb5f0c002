"""Which CUDA kernels belong to a convolution algorithm. Most of the names were recorded on an H200 (cuDNN 9.19)."""

from __future__ import annotations

import pytest

from hase.extras.convolutions.profiling.algorithms import counted, unexpected

ADD = "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::CUDAFunctor_add<float> > >"
IM2COL = "void cudnn::engines_precompiled::im2col4d_kernel<float, long>(cudnn::engines_precompiled::im2col4d_params)"
EXPLICIT = "void explicit_convolve_sgemm<float, int, 128, 6, 7, 3, 3, 5, 0, false>(int, int, int, float const*)"
IMPLICIT = "void implicit_convolve_sgemm<float, float, 1024, 5, 5, 3, 3, 3, 1, false, false, true>(int, int, int, float const*)"
DIRECT = "void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, false, false, false, false, 0, 0, int, float, float>"
TO_NHWC = "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>"
PRECOMP = ("sm90_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize64x128x32_warpgroupsize1x1x1_g1_execute_"
           "segment_k_off_kernel__5x_cudnn")
PRECOMP_CUTLASS = "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_s1688fprop_optimized_tf32_256x64_16x4_nhwc_align4>"
PRODUCT = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_64x64_32x6_nn_align4>"
SPLIT = "void cublasLt::splitKreduce_kernel<32, 16, int, float, float, float, float, false, float, float, float, true, false>"
COMPLEX_PRODUCT = "sm80_xmma_gemm_cf32cf32_f32f32_cf32_tn_n_tilesize32x32x8_stage3_warpsize2x2x1_ffma_kernel__5x_cublas"
FFT = ("void flip_filter<float, float>", "void fft2d_r2c_64x64<float>", COMPLEX_PRODUCT, "void fft2d_c2r_64x64<float, false>")
FFT_LARGE = ("void DSE::regular_fft_pad<0, 1, 128, 16, 32, 1, float, float>", "void DSE::vector_fft<0, 1, 128, 8, 8, 1>")
FFT_TILES = ("void fft1d_r2c_32<float, float, float2, false, false>", COMPLEX_PRODUCT, "void fft1d_c2r_32<float2, float>")
WINOGRAD = tuple(f"void cudnn::winograd_nonfused::winogradForward{part}4x4<float>" for part in ("Data", "Filter", "Output"))
OF_NO_ALGORITHM = "void at::native::direct_copy_kernel_cuda"  # torch copies a tensor that was not contiguous


@pytest.mark.parametrize(("name", "kernels"), [
    ("gemm", (IM2COL, EXPLICIT, ADD)), ("implicit gemm", (OF_NO_ALGORITHM, IMPLICIT, ADD)), ("fft", FFT), ("fft", FFT_LARGE),
    ("implicit precomp gemm", (TO_NHWC, PRECOMP)), ("implicit precomp gemm", (TO_NHWC, PRECOMP_CUTLASS)),
    ("implicit precomp gemm", ("volta_scudnn_128x64_relu_interior_nn_v1",)),  # of older GPUs
    ("fft tiling", FFT_TILES), ("winograd nonfused", (*WINOGRAD, PRODUCT)),
    ("winograd", ("maxwell_scudnn_winograd_128x128_ldg1_ldg4_tile148n_nt",)),  # of older GPUs
    ("guess", (DIRECT,)), ("default", ())])
def test_kernels_of_the_algorithm(name: str, kernels: tuple[str, ...]) -> None:
    assert not unexpected(name, kernels)
    assert not unexpected(name, counted(3 * kernels))


@pytest.mark.parametrize(("name", "kernels", "wrong"), [
    ("gemm", (DIRECT, ADD), f"gemm launched {DIRECT}"),
    ("implicit gemm", (DIRECT,), f"implicit gemm launched {DIRECT}"),
    ("implicit precomp gemm", (IMPLICIT,), f"implicit precomp gemm launched {IMPLICIT}"),
    ("implicit gemm", (PRECOMP,), f"implicit gemm launched {PRECOMP}"),
    ("gemm", (IMPLICIT,), f"gemm launched {IMPLICIT}"),
    ("fft", FFT_TILES, f"fft launched {FFT_TILES[0]}, {FFT_TILES[2]}"),
    ("fft tiling", FFT, f"fft tiling launched {FFT[1]}, {FFT[3]}"),
    ("fft tiling", FFT_LARGE[:1], f"fft tiling launched {FFT_LARGE[0]}"),
    ("winograd", WINOGRAD[:1], f"winograd launched {WINOGRAD[0]}"),
    ("implicit precomp gemm", WINOGRAD, f"implicit precomp gemm launched {', '.join(WINOGRAD)}"),
    ("winograd nonfused", (PRODUCT,), f"no kernel of winograd nonfused among {PRODUCT}"),
    ("fft", (), "no kernel of fft among none")])
def test_kernels_of_another_algorithm(name: str, kernels: tuple[str, ...], wrong: str) -> None:
    assert unexpected(name, kernels) == wrong


def test_a_plain_product_computes_filters_of_one_pixel_alone() -> None:
    for name in ("gemm", "implicit gemm", "implicit precomp gemm"):
        assert not unexpected(name, (PRODUCT, SPLIT), pointwise=True)
        assert unexpected(name, (PRODUCT, SPLIT)) == f"no kernel of {name} among {PRODUCT}, {SPLIT}"
    assert unexpected("fft", (PRODUCT,), pointwise=True)
    assert unexpected("implicit precomp gemm", (DIRECT,), pointwise=True)


def test_names_with_counts() -> None:
    assert counted(["a", "b", "a", "a"]) == ("3 x a", "b")
    assert counted(counted(["a", "b", "a"])) == ("2 x a", "b")
