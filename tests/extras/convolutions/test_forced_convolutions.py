"""Convolution algorithms: their names and CUDA kernels (most recorded on an H200), and models whose convolutions run one
algorithm: cuDNN's descriptors, what is refused, outputs equal to torch's."""

from __future__ import annotations

from ctypes import byref, c_int

import pytest
import torch
import torchvision

from hase.extras.convolutions.profiling import engines, listing
from hase.extras.convolutions.profiling import engines as cudnn
from hase.extras.convolutions.profiling.algorithms import (
    CPU_ALGORITHMS,
    GPU_ALGORITHMS,
    NotSupported,
    algorithm_named,
    convolution_shape,
    count_names,
    describe_unexpected,
)
from hase.extras.convolutions.profiling.engines import (
    INACCURATE,
    OK,
    Choice,
    CudnnEngine,
    Descriptors,
    ForcedModel,
    LayerPlan,
    TorchEngine,
    ai3_missing,
    check,
    engine_of,
    incompatible,
    library,
    output_error,
)
from hase.extras.convolutions.profiling.listing import checked_gpu, gpu_name
from hase.utils.errors import UserError

needs_cudnn = pytest.mark.skipif(not torch.backends.cudnn.is_available(), reason="this torch has no cuDNN")
LAYERS = {
    "plain": torch.nn.Conv2d(3, 8, 3, padding=1),
    "strided": torch.nn.Conv2d(4, 6, 5, stride=2, padding=2, bias=False),
    "dilated": torch.nn.Conv2d(4, 4, 3, dilation=2),
    "depthwise": torch.nn.Conv2d(6, 6, 3, padding=1, groups=6),
    "wide": torch.nn.Conv2d(4, 8, (1, 7), padding=(0, 3), stride=(1, 2)),
    "same": torch.nn.Conv2d(4, 4, 3, padding="same", dilation=3),
}


class PretendedCudnn:
    """Pretends to be cuDNN on a GPU, which is not here: it reads cuDNN's real descriptors, and computes with torch.

    It supports only `gemm`, its second choice.
    """

    def use_stream(self) -> None:
        pass

    def workspace_bytes(self, made: Descriptors, number: int) -> int:
        if number != GPU_ALGORITHMS["gemm"].number:
            raise NotSupported("CUDNN_STATUS_NOT_SUPPORTED", "not this one")
        return 64

    def choices(self, made: Descriptors) -> list[Choice]:
        return [Choice("fft", cudnn.DEFAULT_MATH), Choice("gemm", cudnn.FMA_MATH)]

    def forward(self, made: Descriptors, number: int, images: torch.Tensor, weights: torch.Tensor, output: torch.Tensor,
                workspace: torch.Tensor | None) -> None:
        assert workspace is not None
        assert workspace.numel() == 64
        sizes, groups = [c_int() for _ in range(8)], c_int()
        check(library().cudnnGetConvolution2dDescriptor(made.convolution, *map(byref, sizes)))
        check(library().cudnnGetConvolutionGroupCount(made.convolution, byref(groups)))
        values = [size.value for size in sizes]
        output.copy_(torch.nn.functional.conv2d(images, weights, None, values[2:4], values[0:2], values[4:6], groups.value))


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "Cudnn", PretendedCudnn)


@needs_cudnn
@pytest.mark.parametrize("name", LAYERS)
def test_cudnns_descriptors_are_those_of_the_layer(name: str, pretended: None) -> None:
    """cuDNN's own output size is torch's, and what its descriptors say computes what torch does."""
    layer, images = LAYERS[name], torch.randn(2, LAYERS[name].in_channels, 19, 23)
    with torch.inference_mode():
        shape, expected = convolution_shape(layer, images), layer(images)
        assert Descriptors(shape, True).output_shape == tuple(expected.shape)
        assert shape.out_size == tuple(expected.shape[2:])
        plan = CudnnEngine(GPU_ALGORITHMS["gemm"], True).plan(layer, images)
        assert (plan.algorithm, plan.workspace_bytes) == ("gemm", 64)
        assert torch.allclose(plan.run(images), expected, atol=1e-5)
        assert output_error(plan, layer, images) < 1e-5
        assert CudnnEngine(GPU_ALGORITHMS["guess"], True).plan(layer, images).algorithm == "gemm"


def test_what_a_layer_takes() -> None:
    shape = convolution_shape(torch.nn.Conv2d(4, 8, 3, padding=1, groups=2), torch.ones(2, 4, 10, 12))
    assert shape.flops == 2 * (2 * 10 * 12) * 8 * 9 * 2
    assert shape.bytes_moved == 4 * (2 * 4 * 120 + 2 * 8 * 120 + 8 * 2 * 9)
    images = torch.ones(1, 3, 8, 8)
    with pytest.raises(NotSupported, match="padding mode reflect"):
        convolution_shape(torch.nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"), images)
    with pytest.raises(NotSupported, match="its sides differ"):
        convolution_shape(torch.nn.Conv2d(3, 3, 2, padding="same"), images)


@needs_cudnn
def test_cudnns_status_and_reason() -> None:
    with pytest.raises(NotSupported) as refused:
        check(3007)
    assert refused.value.status == "CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH"
    layer = torch.nn.Conv2d(3, 8, 9)
    with pytest.raises(NotSupported, match="CUDNN_STATUS"):
        Descriptors(convolution_shape(layer, torch.ones(1, 3, 4, 4)), True)  # smaller than the filter


class Twice(torch.nn.Module):
    """Calls one convolution twice, at two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(4, 4, 3, stride=2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.shared(self.shared(self.first(images)))


class Pretending(TorchEngine):
    """torch's convolution, which pretends not to support some channels, to fail with torch's kind of error, or to compute
    something else: there is no library here that would."""

    def __init__(self, refused: int = 0, error: str = "", factor: float = 1.0) -> None:
        self.refused, self.error, self.factor = refused, error, factor

    def plan(self, layer: torch.nn.Conv2d, images: torch.Tensor) -> LayerPlan:
        if self.error:
            raise RuntimeError(self.error)
        if layer.in_channels == self.refused:
            raise NotSupported("CUDNN_STATUS_NOT_SUPPORTED", "too few")
        return LayerPlan(lambda images: self.factor * type(layer).forward(layer, images), "gemm")


def planned(engine: TorchEngine, fallback: TorchEngine | None = None) -> tuple[ForcedModel, torch.Tensor]:
    """`Twice` with the plans of an engine, and images."""
    torch.manual_seed(0)
    forced, images = ForcedModel(Twice().eval(), engine, fallback=fallback), torch.randn(1, 3, 15, 15)
    forced.plan(images)
    return forced, images


def test_a_refused_layer_and_its_fallback() -> None:
    forced, _ = planned(TorchEngine())
    assert [(call.layer, call.shape and call.shape.height) for call in forced.calls] == [
        ("first", 15), ("shared", 15), ("shared.call2", 7)]
    refused, _ = planned(Pretending(refused=3))
    assert [(call.status, call.algorithm) for call in refused.calls] == [
        ("CUDNN_STATUS_NOT_SUPPORTED", ""), (OK, "gemm"), (OK, "gemm")]
    message = incompatible("gemm", "twice", refused.calls)
    assert message.startswith("Algorithm gemm not compatible with model twice: 1 of 3 layers (first): "
                              "CUDNN_STATUS_NOT_SUPPORTED, too few")
    helped, images = planned(Pretending(refused=3, factor=1 + 1e-5), fallback=TorchEngine())
    assert [call.algorithm for call in helped.calls] == ["default", "gemm", "gemm"]
    assert helped.calls[0].status == "CUDNN_STATUS_NOT_SUPPORTED"
    with torch.inference_mode():
        by_torch = helped.model(images)
        with helped.forced():
            assert not torch.equal(helped.model(images), by_torch)
        assert torch.equal(helped.model(images), by_torch)
    wrong, _ = planned(Pretending(factor=1.01))
    assert {call.status for call in wrong.calls} == {INACCURATE}
    assert "differs from torch's by 0.01" in wrong.calls[0].detail


def test_a_library_that_fails_is_a_status_except_without_memory() -> None:
    broken, _ = planned(Pretending(error="groups must be 1\nand more"), fallback=TorchEngine())
    assert {(call.status, call.detail, call.algorithm) for call in broken.calls} == {("FAILED", "groups must be 1", "default")}
    with pytest.raises(RuntimeError, match="out of memory"):
        planned(Pretending(error="CUDA out of memory"))


def test_a_whole_model_by_aithree() -> None:
    if ai3_missing():
        with pytest.raises(UserError, match=r"pip install '\.\[convolutions\]'"):
            engine_of(CPU_ALGORITHMS["smm"], "cpu")
        return
    torch.manual_seed(0)
    model, images = torchvision.models.squeezenet1_1().eval(), torch.randn(1, 3, 64, 64)
    forced = ForcedModel(model, engine_of(CPU_ALGORITHMS["direct"], "cpu"))
    forced.plan(images)
    assert len(forced.calls) == 26
    assert {(call.status, call.algorithm) for call in forced.calls} == {(OK, "direct")}
    with torch.inference_mode():
        expected = model(images)
    with forced.forced():
        assert torch.allclose(model(images), expected, atol=1e-4)


def test_names_of_algorithms() -> None:
    """Spaces, underscores and dashes are the same. The numbers are cuDNN's (cudnnConvolutionFwdAlgo_t)."""
    for text in ("implicit precomp gemm", "implicit_precomp_gemm", "Implicit-Precomp GEMM", " implicit  precomp_gemm"):
        assert algorithm_named(text, "cuda").name == "implicit precomp gemm"
    assert {name: algorithm.number for name, algorithm in GPU_ALGORITHMS.items()} == {
        "implicit gemm": 0, "implicit precomp gemm": 1, "gemm": 2, "direct": 3, "fft": 4, "fft tiling": 5, "winograd": 6,
        "winograd nonfused": 7, "guess": None, "default": None}
    for text, device, message in (
            ("winogard", "cuda", "did you mean winograd"), ("xyz", "cpu", "no such algorithm on cpu"),
            ("fft", "cpu", r"cuDNN is not available: algorithm fft needs an NVIDIA GPU.* default, direct, smm")):
        with pytest.raises(UserError, match=message):
            algorithm_named(text, device)


@pytest.mark.parametrize(("full", "short"), [
    ("NVIDIA H200", "h200"), ("Tesla V100-SXM2-32GB", "v100"), ("NVIDIA RTX A6000", "rtx-a6000")])
def test_short_names_of_gpus(full: str, short: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names are those that the driver gives; these GPUs are not here."""
    monkeypatch.setattr(listing, "gpu_facts", lambda: {"name": full})
    assert gpu_name("cuda") == short
    assert checked_gpu(short, "cuda") == short
    with pytest.raises(UserError, match=f"the device of this machine is {full}; use --gpu {short}"):
        checked_gpu("l40s", "cuda")


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
    assert not describe_unexpected(name, kernels)
    assert not describe_unexpected(name, count_names(3 * kernels))


@pytest.mark.parametrize(("name", "kernels", "wrong"), [
    ("gemm", (DIRECT, ADD), f"gemm launched {DIRECT}"),
    ("implicit precomp gemm", (IMPLICIT,), f"implicit precomp gemm launched {IMPLICIT}"),
    ("implicit gemm", (PRECOMP,), f"implicit gemm launched {PRECOMP}"),
    ("fft", FFT_TILES, f"fft launched {FFT_TILES[0]}, {FFT_TILES[2]}"),
    ("fft tiling", FFT, f"fft tiling launched {FFT[1]}, {FFT[3]}"),
    ("winograd", WINOGRAD[:1], f"winograd launched {WINOGRAD[0]}"),
    ("winograd nonfused", (PRODUCT,), f"no kernel of winograd nonfused among {PRODUCT}"),
    ("fft", (), "no kernel of fft among none")])
def test_kernels_of_another_algorithm(name: str, kernels: tuple[str, ...], wrong: str) -> None:
    assert describe_unexpected(name, kernels) == wrong


def test_a_plain_product_computes_filters_of_one_pixel_alone() -> None:
    assert not describe_unexpected("gemm", (PRODUCT, SPLIT), pointwise=True)
    assert describe_unexpected("gemm", (PRODUCT, SPLIT)) == f"no kernel of gemm among {PRODUCT}, {SPLIT}"
    assert describe_unexpected("fft", (PRODUCT,), pointwise=True)
