"""Convolution algorithms by name: which ones a device has, and what they are.

On a GPU they are cuDNN's (`cudnnConvolutionFwdAlgo_t` in the cuDNN API reference). On a CPU they are torch's own and the two of
the package aithree, which is imported as `ai3`.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from utils.errors import UserError

GUESS = "guess"
DEFAULT = "default"
HOPPER = (9, 0)  # its compute capability


@dataclass(frozen=True)
class Algorithm:
    """One way to compute a convolution.

    Attributes:
        name: with blanks; underscores in file names.
        meaning: in a few words.
        number: cuDNN's; None where cuDNN or torch chooses, and on a CPU.
    """

    name: str
    meaning: str
    number: int | None = None

    @property
    def file_name(self) -> str:
        return self.name.replace(" ", "_")


ON_GPU = {one.name: one for one in (
    Algorithm("direct", "straightforward convolution; cuDNN names it but never implemented it", 3),
    Algorithm("gemm", "a matrix of all windows (im2col), then one matrix product", 2),
    Algorithm("implicit gemm", "a matrix product that reads the windows from the image", 0),
    Algorithm("implicit precomp gemm", "the same with indices that are computed first", 1),
    Algorithm("fft", "products of Fourier transforms of whole images", 4),
    Algorithm("fft tiling", "products of Fourier transforms of tiles", 5),
    Algorithm("winograd", "Winograd's transform in one kernel; 3x3 filters", 6),
    Algorithm("winograd nonfused", "Winograd's transform in several kernels; 3x3 and 5x5 filters", 7),
    Algorithm(GUESS, "cuDNN's own choice for each layer, by its heuristic"),
    Algorithm(DEFAULT, "what torch runs: cuDNN by its newer interface"),
)}
ON_CPU = {one.name: one for one in (
    Algorithm(DEFAULT, "what torch runs: oneDNN"),
    Algorithm("direct", "straightforward convolution, of the package aithree"),
    Algorithm("smm", "a scalar of the filter times a matrix of the image, summed; of the package aithree"),
)}
FROM_AI3 = ("direct", "smm")  # on a CPU


def algorithms_of(device: str) -> dict[str, Algorithm]:
    """The algorithms of `cpu` or `cuda`, by name."""
    return ON_GPU if device == "cuda" else ON_CPU


def algorithm_named(text: str, device: str) -> Algorithm:
    """The algorithm that `text` names, with blanks, underscores or dashes.

    Raises:
        UserError: there is none, or this device does not have it.
    """
    name = " ".join(re.split(r"[\s_-]+", text.strip().lower()))
    known = algorithms_of(device)
    if name in known:
        return known[name]
    if device == "cpu" and name in ON_GPU:
        raise UserError(f"cuDNN is not available: algorithm {name} needs an NVIDIA GPU, and this device is a CPU; its "
                        f"algorithms are {', '.join(known)}")
    near = difflib.get_close_matches(name, known, 3, 0.7)
    raise UserError(f"{text}: no such algorithm on {device}"
                    + (f"; did you mean {' or '.join(near)}?" if near else f" (it has {', '.join(known)})"))


def never_runs(algorithm: Algorithm, device: str, capability: tuple[int, int] | None = None) -> str:
    """Why no layer can run this algorithm on the device; "" where some may.

    Args:
        capability: the GPU's compute capability; None for a CPU, or where it is not known.
    """
    if device != "cuda":
        return ""
    if algorithm.name == "direct":
        return "cuDNN never implemented it"
    if algorithm.name == "winograd" and capability is not None and capability >= HOPPER:
        return "cuDNN does not support it since Hopper (compute capability 9.0)"
    return ""
