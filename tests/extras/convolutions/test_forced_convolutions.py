"""Models whose convolutions run one algorithm: cuDNN's descriptors, what is refused, and outputs equal to torch's."""

from __future__ import annotations

from ctypes import byref, c_int

import pytest
import torch
import torchvision

from hase.extras.convolutions.profiling import engines
from hase.extras.convolutions.profiling import engines as cudnn
from hase.extras.convolutions.profiling.algorithms import ON_CPU, ON_GPU, NotSupported, shape_of
from hase.extras.convolutions.profiling.engines import (
    INACCURATE,
    MOST_MODEL_TOLERANCE,
    OK,
    Choice,
    Cudnn,
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
from hase.extras.convolutions.profiling.measure import output_difference
from hase.utils.errors import UserError
from hase.utils.fingerprint import has_cuda

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
        if number != ON_GPU["gemm"].number:
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
        shape, expected = shape_of(layer, images), layer(images)
        assert Descriptors(shape, True).output_shape == tuple(expected.shape)
        assert shape.out_size == tuple(expected.shape[2:])
        plan = CudnnEngine(ON_GPU["gemm"], True).plan(layer, images)
        assert (plan.algorithm, plan.workspace_bytes) == ("gemm", 64)
        assert torch.allclose(plan.run(images), expected, atol=1e-5)
        assert output_error(plan, layer, images) < 1e-5
        assert CudnnEngine(ON_GPU["guess"], True).plan(layer, images).algorithm == "gemm"


def test_what_a_layer_takes() -> None:
    shape = shape_of(torch.nn.Conv2d(4, 8, 3, padding=1, groups=2), torch.ones(2, 4, 10, 12))
    assert shape.flops == 2 * (2 * 10 * 12) * 8 * 9 * 2
    assert shape.bytes_moved == 4 * (2 * 4 * 120 + 2 * 8 * 120 + 8 * 2 * 9)
    images = torch.ones(1, 3, 8, 8)
    with pytest.raises(NotSupported, match="padding mode reflect"):
        shape_of(torch.nn.Conv2d(3, 3, 3, padding=1, padding_mode="reflect"), images)
    with pytest.raises(NotSupported, match="its sides differ"):
        shape_of(torch.nn.Conv2d(3, 3, 2, padding="same"), images)


@needs_cudnn
def test_cudnns_status_and_reason() -> None:
    with pytest.raises(NotSupported) as refused:
        check(3007)
    assert refused.value.status == "CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH"
    layer = torch.nn.Conv2d(3, 8, 9)
    with pytest.raises(NotSupported, match="CUDNN_STATUS"):
        Descriptors(shape_of(layer, torch.ones(1, 3, 4, 4)), True)  # smaller than the filter


@needs_cudnn
@pytest.mark.skipif(has_cuda(), reason="has a GPU")
def test_without_a_gpu_cudnn_is_an_error() -> None:
    with pytest.raises(UserError, match="cuDNN is not available: "):
        Cudnn()


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


def test_layers_in_the_order_of_a_run() -> None:
    forced, _ = planned(TorchEngine())
    assert [call.layer for call in forced.calls] == ["first", "shared", "shared.call2"]
    assert [call.shape.height for call in forced.calls if call.shape] == [15, 15, 7]
    assert {call.status for call in forced.calls} == {OK}


def test_a_refused_layer_and_its_fallback() -> None:
    refused, _ = planned(Pretending(refused=3))
    assert [(call.status, call.algorithm) for call in refused.calls] == [
        ("CUDNN_STATUS_NOT_SUPPORTED", ""), (OK, "gemm"), (OK, "gemm")]
    message = incompatible("gemm", "twice", refused.calls)
    assert message.startswith("Algorithm gemm not compatible with model twice: 1 of 3 layers (first): "
                              "CUDNN_STATUS_NOT_SUPPORTED, too few")
    helped, images = planned(Pretending(refused=3), fallback=TorchEngine())
    assert [call.algorithm for call in helped.calls] == ["default", "gemm", "gemm"]
    assert helped.calls[0].status == "CUDNN_STATUS_NOT_SUPPORTED"
    with torch.inference_mode():
        expected = helped.model(images)
        with helped.forced():
            assert torch.equal(helped.model(images), expected)


def test_wrong_outputs_do_not_count_as_run() -> None:
    forced, _ = planned(Pretending(factor=1.01))
    assert {call.status for call in forced.calls} == {INACCURATE}
    assert "differs from torch's by 0.01" in forced.calls[0].detail


def test_a_library_that_fails_is_a_status_except_without_memory() -> None:
    broken, _ = planned(Pretending(error="groups must be 1\nand more"), fallback=TorchEngine())
    assert {(call.status, call.detail, call.algorithm) for call in broken.calls} == {("FAILED", "groups must be 1", "default")}
    with pytest.raises(RuntimeError, match="out of memory"):
        planned(Pretending(error="CUDA out of memory"))


def test_the_forced_function_runs_only_in_the_block() -> None:
    forced, images = planned(Pretending(factor=1 + 1e-5))
    with torch.inference_mode():
        by_torch = forced.model(images)
        with forced.forced():
            assert not torch.equal(forced.model(images), by_torch)
        assert torch.equal(forced.model(images), by_torch)


@pytest.mark.skipif(bool(ai3_missing()), reason="aithree is optional")
@pytest.mark.parametrize("algorithm", ["direct", "smm"])
def test_a_whole_model_by_aithree(algorithm: str) -> None:
    torch.manual_seed(0)
    model, images = torchvision.models.squeezenet1_1().eval(), torch.randn(1, 3, 64, 64)
    forced = ForcedModel(model, engine_of(ON_CPU[algorithm], "cpu"))
    forced.plan(images)
    assert len(forced.calls) == 26
    assert {(call.status, call.algorithm) for call in forced.calls} == {(OK, algorithm)}
    with torch.inference_mode():
        expected = model(images)
    with forced.forced():
        assert torch.allclose(model(images), expected, atol=1e-4)


@pytest.mark.skipif(not ai3_missing(), reason="aithree is installed")
def test_without_aithree_the_error_names_its_requirements() -> None:
    with pytest.raises(UserError, match=r"pip install -r requirements-convolutions\.txt"):
        engine_of(ON_CPU["smm"], "cpu")


def test_a_layer_with_the_plan_of_another_layer_exceeds_the_tolerance() -> None:
    """Two layers of the same shape with exchanged plans. Noise like that of TF32 stays within the tolerance of a model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(2))).eval()
    images = torch.randn(1, 4, 9, 9)
    forced = ForcedModel(model, TorchEngine())
    forced.plan(images)
    assert output_difference(forced, images) == 0.0
    forced._plans.reverse()
    assert output_difference(forced, images) > MOST_MODEL_TOLERANCE
    assert forced.model_tolerance(images) == pytest.approx(0.01)
    assert forced.model_tolerance(images.half()) == MOST_MODEL_TOLERANCE
