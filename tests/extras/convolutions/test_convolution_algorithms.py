"""Names of convolution algorithms, and names of devices."""

from __future__ import annotations

import pytest

from hase.extras.convolutions.profiling import listing
from hase.extras.convolutions.profiling.algorithms import HOPPER, ON_CPU, ON_GPU, algorithm_named, never_runs
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
