"""The catalogue of GPUs: what it holds, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hase.records.devices import catalogue, gpu_memory_mib, gpu_named, read_gpus
from hase.utils.errors import UserError
from hase.utils.fingerprint import slug

L40S = {"name": "NVIDIA L40S", "aka": ["l40s"], "generation": "ada", "compute_capability": 8.9, "sms": 142, "boost_mhz": 2520,
        "memory_gib": 48, "bandwidth_gb_s": 864, "l2_mb": 96, "power_w": 350, "fp32_tflop_s": 91.6, "fp16_tflop_s": 362,
        "bf16_tflop_s": 362, "tf32_tflop_s": 183, "link": "pcie4", "source": "its data sheet"}


def written(folder: Path, **changed: object) -> Path:
    path = folder / "gpus.yaml"
    path.write_text(yaml.safe_dump({"gpus": [L40S | changed]}), encoding="utf-8")
    return path


def test_it_has_data_centre_workstation_consumer_and_embedded_cards() -> None:
    assert {gpu.slug for gpu in catalogue()} >= {"t4", "a100", "h200", "rtx-4090", "a6000", "jetson-agx-orin"}
    known = [name for gpu in catalogue() for name in {slug(gpu.name), *gpu.aka}]
    assert len(known) == len(set(known)), "two cards have one name"


@pytest.mark.parametrize(("name", "found"), [("NVIDIA H200", "h200"), ("RTX 4090", "rtx-4090"), ("h100-sxm", "h100"),
                                             ("mi300x", None)])
def test_cards_are_found_by_any_of_their_names(name: str, found: str | None) -> None:
    gpu = gpu_named(name)
    assert (gpu and gpu.slug) == found
    assert gpu_memory_mib(name) == (gpu and gpu.memory_gib * 1024)


def test_products_run_at_the_peak_of_their_type() -> None:
    h200, t4, p100 = (next(gpu for gpu in catalogue() if gpu.slug == name) for name in ("h200", "t4", "p100"))
    assert [gpu.peak_tflop_s("float32") for gpu in (h200, t4, p100)] == [494.7, 8.1, 9.3]  # TF32 since Ampere
    assert [gpu.peak_tflop_s("float16") for gpu in (h200, t4, p100)] == [989, 65, 9.3]  # tensor cores since Volta
    assert t4.peak_tflop_s("bfloat16") == 8.1


@pytest.mark.parametrize(("changed", "message"), [
    ({"fp16_tflop_s": 733}, "was it given with sparsity"),
    ({"fp32_tflop_s": 45.8}, r"142 SMs × 128 lanes × 2520 MHz make 91\.6"),
    ({"sms": 0}, "sms"),
    ({"compute_capability": 5.0}, "compute capability 5 is not known"),
    ({"bandwith": 3}, "did you mean bandwidth_gb_s"),
])
def test_what_can_not_be_is_refused(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    assert read_gpus(written(tmp_path))[0].slug == "l40s"
    with pytest.raises(UserError, match=message):
        read_gpus(written(tmp_path, **changed))
