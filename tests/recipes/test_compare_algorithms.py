"""The names of CUDA kernels tell which algorithm ran."""

from __future__ import annotations

import pytest

from kernel_model.sampling.free_shapes.sizes import CONTRIB, kernel, tensor
from recipes.llm.compare_algorithms import algorithm_seen, compare
from records.kernel_record import Kernel
from runtimes.ort.cuda.language_kernels import ALGORITHMS

NAMES = {  # as in onnxruntime-gpu 1.31.1, shortened
    "xqa": ["void UnpackRoPEAppend<__half>(…)", "onnxruntime::contrib::cuda::H128::grp4_fp16::kernel_mha(unsigned int, …)"],
    "flash": ["void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>(…)"],
    "vector": ["void onnxruntime::contrib::cuda::MatMulFloat4BitsKernelM1<__half, 32, false>(…)"],
    "rows": ["void onnxruntime::contrib::cuda::(anonymous namespace)::MatMulFloat4BatchedKernel<__half, 32, false, 8, 2>(…)"],
    "dequantised": ["void onnxruntime::contrib::cuda::Dequantize4BitsKernel<__half, unsigned char>(…)", "nvjet_hsh_128x128(…)"],
    "unfused": ["nvjet_hsh_128x128(…)", "void onnxruntime::…::SoftmaxWithRawMaskSmallKernel<__half>(…)"],
    "other": ["nvjet_hsh_128x128(…)"]}


@pytest.mark.parametrize("algorithm", NAMES)
def test_algorithms_are_known_by_names(algorithm: str) -> None:
    assert algorithm_seen(NAMES[algorithm]) == algorithm
    assert algorithm == "other" or algorithm in ALGORITHMS


def test_rules_and_names_are_compared_by_kernel() -> None:
    def product(rows: int) -> Kernel:
        inputs = [tensor("float16", rows, 512), tensor("uint8", 64, 16, 16, constant=True),
                  tensor("float16", 64, 16, constant=True)]
        return kernel("MatMulNBits", inputs, [(rows, 64)], CONTRIB, K=512, N=64, bits=4, block_size=32)

    plain = kernel("Sigmoid", [tensor("float16", 8)], [(8,)])
    rows = compare([(product(1), NAMES["vector"]), (product(1), NAMES["rows"]), (product(8), NAMES["rows"]),
                    (product(8), NAMES["rows"]), (product(99), NAMES["dequantised"]), (plain, ["sigmoid"])])
    assert [(row["by the rules"], row["by the names"], row["kernels"], row["same"]) for row in rows] == [
        ("dequantised", "dequantised", 1, True), ("rows", "rows", 2, True), ("vector", "rows", 1, False),
        ("vector", "vector", 1, True)]
