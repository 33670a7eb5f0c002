"""Names of convolution algorithms, of devices, and of the CUDA kernels that belong to an algorithm (most were recorded on an
H200, with cuDNN 9.19)."""

from __future__ import annotations

import pytest

from hase.extras.convolutions.profiling import listing
from hase.extras.convolutions.profiling.algorithms import (
    HOPPER,
    ON_CPU,
    ON_GPU,
    algorithm_named,
    counted,
    never_runs,
    unexpected,
)
from hase.extras.convolutions.profiling.listing import checked_gpu, gpu_name
from hase.extras.convolutions.profiling.measure import ProfileSettings, even_sizes
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda


def test_names_of_algorithms() -> None:
    """Spaces, underscores and dashes are the same. The numbers are cuDNN's (cudnnConvolutionFwdAlgo_t)."""
    for text in ("implicit precomp gemm", "implicit_precomp_gemm", "Implicit-Precomp GEMM", " implicit  precomp_gemm"):
        assert algorithm_named(text, "cuda").name == "implicit precomp gemm"
    assert {name: algorithm.number for name, algorithm in ON_GPU.items()} == {
        "implicit gemm": 0, "implicit precomp gemm": 1, "gemm": 2, "direct": 3, "fft": 4, "fft tiling": 5, "winograd": 6,
        "winograd nonfused": 7, "guess": None, "default": None}
    for text, device, message in (
            ("winogard", "cuda", "did you mean winograd"), ("xyz", "cpu", "no such algorithm on cpu"),
            ("fft", "cpu", r"cuDNN is not available: algorithm fft needs an NVIDIA GPU.* default, direct, smm")):
        with pytest.raises(UserError, match=message):
            algorithm_named(text, device)


def test_algorithms_that_never_run() -> None:
    never = {name for name, algorithm in ON_GPU.items() if never_runs(algorithm, "cuda", HOPPER)}
    assert never == {"direct", "winograd"}
    assert {name for name, algorithm in ON_GPU.items() if never_runs(algorithm, "cuda", (8, 9))} == {"direct"}
    assert not [algorithm for algorithm in ON_CPU.values() if never_runs(algorithm, "cpu")]


@pytest.mark.parametrize(("count", "smallest", "largest", "sizes"), [
    (100, 224, 1016, tuple(range(224, 1017, 8))), (1, 224, 1016, (224,)), (3, 63, 100, (64, 82, 100)),
    (9, 32, 36, (32, 34, 36)), (2, 64, 64, (64,))])
def test_even_sizes(count: int, smallest: int, largest: int, sizes: tuple[int, ...]) -> None:
    assert even_sizes(count, smallest, largest) == sizes


def test_impossible_sizes() -> None:
    with pytest.raises(UserError, match="--min-size 300 is larger than --max-size 200"):
        even_sizes(3, 300, 200)
    with pytest.raises(UserError, match="no even input size"):
        even_sizes(3, 33, 33)


def test_names_of_a_profile() -> None:
    settings = ProfileSettings(model="vgg16", algorithm="fft tiling", gpu="h200", device="cuda", device_name="NVIDIA H200",
                               input_sizes=(64, 96), batch=4)
    assert settings.name == "vgg16_fft_tiling"
    assert [unit.id for unit in settings.units] == ["vgg16_fft_tiling_b4_fp32_64", "vgg16_fft_tiling_b4_fp32_96"]
    assert settings.same_but_sizes(settings.model_copy(update={"input_sizes": (1,), "measure": 7}))
    assert not settings.same_but_sizes(settings.model_copy(update={"fallback": True}))


@pytest.mark.parametrize(("full", "short"), [("NVIDIA H200", "h200"), ("NVIDIA L40S", "l40s"), ("Tesla V100-SXM2-32GB", "v100"),
                                             ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA RTX A6000", "rtx-a6000")])
def test_short_names_of_gpus(full: str, short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are those that the driver gives; these GPUs are not here."""
    monkeypatch.setattr(listing, "gpu_facts", lambda: {"name": full})
    assert gpu_name("cuda") == short
    assert checked_gpu(short, "cuda") == short
    with pytest.raises(UserError, match=f"the device of this machine is {full}; use --gpu {short}"):
        checked_gpu("l40s" if short != "l40s" else "h100", "cuda")


@pytest.mark.skipif(has_cuda(), reason="has a GPU")
def test_a_gpu_that_is_not_here() -> None:
    with pytest.raises(UserError, match=r"is a CPU.*sinfo -C gpul40s"):
        checked_gpu("l40s", "cpu")
    with pytest.raises(UserError, match="--gpu a17: no such device"):
        checked_gpu("a17", "cpu")


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
