"""The questions whose answers must stay the same, as commands that a user types, and code that asks them.

Their workspace is unpacked from `records.tar.xz` (records of many kinds of models, for CUDA and for a CPU) and `cpu.tar.xz` (a
small dataset of a CPU, the records of its models, and predictors trained on it). `run.sh` makes both. Asking needs no GPU and
no model file. All commands run in one process, which saves a second per command.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from hase.records.probe_reading import ProbedRuns, ProbeReading
from hase.utils import files
from hase.utils.files import unpack
from hase.utils.paths import SIDECAR

HERE = Path(__file__).resolve().parent
RECORDS, CPU_WORKSPACE, ANSWERS = (HERE / name for name in ("records.tar.xz", "cpu.tar.xz", "answers.json.xz"))
CPU_CONFIG = HERE / "training.yaml"
TRACE, METRICS, LEARNED = "trace.json", {"cuda": "busy.json", "cpu": "busy_cpu.json"}, "learned"
WORDS = ("warnings", "holds_for", "unknown_because")  # fields of an answer with sentences, which may change
TOLERANCE = 1e-12  # a ratio. Between kinds of CPU (AVX2, AVX-512), numpy's exp and log differ in the last of 16 digits, and
# answers by up to 3.4e-16; on one machine they are always the same, with any number of threads

# Models, by the names of their records in records/<device>/: with fixed sizes, with dynamic sizes, and with sizes, trips or
# branches that depend on data.
STATIC = ("resnet18@batch=1", "resnet18@batch=16", "resnet18@batch=64", "mobilenet_v3_small@batch=4", "bert_mask_static",
          "mixed_fp16_encoder", "qdq_encoder", "qoperator_mlp", "dynamic_int8_mlp", "recurrent_lstm", "unet",
          "sklearn_linear@rows=64")
BY_SIZE = ("resnet18@batch=8,dynamic", "bert_mask@batch=2,sequence=64,dynamic", "decoder_token@batch=1,past=128,dynamic",
           "recommender_dlrm@batch=64,dynamic")
BY_DATA = ("detect_one_stage_nms", "rows_by_nonzero", "loop_constant_trips", "loop_trips_by_input@trips=20", "scan",
           "if_by_data")
FROM_TORCHVISION = ("resnet18", "mobilenet_v3_small")  # exported by model_zoo; the others come from recipes/kinds
RECORDED = (*STATIC, *BY_SIZE, *BY_DATA)

PREDICT = "inference/predict_model_latency.py --config no_prometheus.yaml --json --model records"
CURVE, PAIR = (f"inference/{script} --json --target nvidia-h200 --model records/cuda"
               for script in ("load_curve.py --points 5", "pair_latency.py"))


def questions() -> list[str]:
    """Commands to run in a workspace of `unpacked`, each with the options that the answer depends on."""
    cuda, cpu = f"{PREDICT}/cuda/{{}}.json --target nvidia-h200", f"{PREDICT}/cpu/{{}}.json --target cpu-avx512"
    asked = [run_mode.format(name) for name in RECORDED
             for run_mode in (cuda, f"{cpu} --force" if "fp16" in name else cpu)]
    asked += [f"{cuda.format(name)} {options}" for name, options in (
        ("resnet18@batch=16", "--strict"), ("bert_mask_static", "--strict"), ("mobilenet_v3_small@batch=4", "--strict"),
        ("resnet18@batch=1", "--io host"), ("resnet18@batch=64", "--io host --strict"),
        ("resnet18@batch=1", "--cuda-graph"), ("mobilenet_v3_small@batch=4", "--cuda-graph --strict"),
        ("resnet18@batch=16", "--metrics busy.json"), ("bert_mask@batch=2,sequence=64,dynamic", "--metrics busy.json"),
        ("qoperator_mlp", "--metrics busy.json"), ("resnet18@batch=16", "--probe probe.json"),
        ("detect_one_stage_nms", "--probe probe.json"), ("resnet18@batch=1", "--probe probe.json --slo-ms 2"),
        ("resnet18@batch=16", "--slo-ms 1.5 --slo-percentile 99"), ("resnet18@batch=1", "--trace trace.json"),
        ("scan", "--trace trace.json"), ("qoperator_mlp", "--trace trace.json"))]
    asked += [f"{CURVE}/{name}.json" for name in ("resnet18@batch=16", "qoperator_mlp")]
    asked.append(f"{PAIR}/resnet18@batch=1.json --beside-model records/cuda/bert_mask_static.json")
    asked += [f"{cpu.format(name)} {options}" for name, options in (
        ("resnet18@batch=1", "--strict"), ("bert_mask_static", "--strict"), ("resnet18@batch=1", "--io host"),
        ("resnet18@batch=1", "--metrics busy_cpu.json"), ("bert_mask@batch=2,sequence=64,dynamic", "--metrics busy_cpu.json"),
        ("resnet18@batch=1", "--slo-ms 5"), ("mobilenet_v3_small@batch=4", "--trace trace.json"))]
    measured = f"{PREDICT.removesuffix(' records')} {{}} --target cpu-avx512"
    asked += [f"{measured.format(path)}{options}" for path in (
        "ort_analysis/ort_kernel_record/cpu-avx512-ort1.31-all/squeezenet1_1_fp32_b4_64x64.json",
        "ort_analysis/ort_kernel_record/cpu-avx512-ort1.31-all/mnasnet0_5_fp32_b1_64x64.json") for options in
        ("", " --strict", " --io host", " --metrics busy_cpu.json")]
    return asked


def unpacked(folder: Path) -> Path:
    """Writes the workspace of the questions into `folder`; returns it."""
    for archive in (RECORDS, CPU_WORKSPACE):
        unpack(archive, folder)
    (folder / "no_prometheus.yaml").write_text("prometheus: {url: null}\n", encoding="utf-8")
    (folder / METRICS["cuda"]).write_text('{"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.6, "DCGM_FI_DEV_GPU_UTIL": 60}',
                                          encoding="utf-8")
    busy_cpu = {name: high for name, (_, high) in files.read_json(next(folder.glob(f"training/predictors/*/{SIDECAR}")))[
        "load_range"].items()}
    (folder / METRICS["cpu"]).write_text(json.dumps(busy_cpu), encoding="utf-8")
    files.write_json(folder / "probe.json", made_up_reading())
    return folder


def made_up_reading() -> ProbeReading:
    """A possible reading of the sharing probe next to a background that is busy for 8 of 20 ms, in bursts of 0.5 ms."""
    draw = np.random.default_rng(0)

    def runs(alone_ms: float) -> ProbedRuns:
        starts, latencies, now = [], [], 0.0
        while now < 200.0:
            latency = alone_ms * draw.uniform(1.0, 1.05) + (draw.uniform(0.4, 1.6) if now % 20.0 < 8.0 else 0.0)
            starts.append(now)
            latencies.append(latency)
            now += latency + 0.02
        return ProbedRuns(starts_ms=tuple(starts), latencies_ms=tuple(latencies))

    return ProbeReading(machine_uuid="made-up", device="cuda", sharing="time_slices",
                        started="2026-01-01T00:00:00+00:00", seconds=0.2, tiny=runs(0.0126), long=runs(0.323))


def ask(question: str) -> Any:
    """The answer of a command that runs in the current folder: its JSON output and, if it wrote one, its trace.

    Raises:
        RuntimeError: it ended with an error.
    """
    script, *options = shlex.split(question)
    main = importlib.import_module("hase." + script.removesuffix(".py").replace("/", ".")).main
    out = io.StringIO()
    with mock.patch.object(sys, "argv", [script, "--workspace", ".", "--quiet", *options]), contextlib.redirect_stdout(out):
        status = main()
    if status not in (0, 4):  # 4: a latency objective is missed
        raise RuntimeError(f"{question}: exit status {status}")
    answer = json.loads(out.getvalue())
    if TRACE in options:
        answer.append(files.read_json(Path(TRACE))["traceEvents"])
    return without_words(answer)


def learn_anew() -> None:
    """Trains predictors and fits a composition on the CPU's dataset; they replace the existing ones."""
    for script, *options in (["training/train_kernel_model.py", "--config", str(CPU_CONFIG)], ["training/fit_composition.py"]):
        main = importlib.import_module("hase." + script.removesuffix(".py").replace("/", ".")).main
        with (mock.patch.object(sys, "argv", [script, "--workspace", ".", "--quiet", *options]),
              contextlib.redirect_stdout(io.StringIO())):
            main()


def without_words(answer: Any) -> Any:
    """The answer without sentences, and with kernels sorted by name: by time, the last digit could decide their order."""
    if isinstance(answer, dict):
        return {key: sorted((without_words(kernel) for kernel in value), key=lambda kernel: (kernel["id"], kernel["provider"]))
                if key == "kernels" else without_words(value) for key, value in answer.items() if key not in WORDS}
    return [without_words(value) for value in answer] if isinstance(answer, list) else answer


def answers(folder: Path) -> dict[str, Any]:
    """All questions with their answers, asked in `folder` (see `unpacked`); at the end, some again after a new training."""
    answered = {}
    asked = questions()
    logging.disable(logging.WARNING)
    with contextlib.chdir(folder), mock.patch("hase.inference.core.targets.local_targets", return_value=()):  # wherever it is asked
        for question in asked:
            answered[question] = ask(question)
        learn_anew()
        for question in (question for question in asked if "mnasnet" in question or "squeezenet" in question):
            answered[f"{question} ({LEARNED} anew)"] = ask(question)
    return answered


def differences(expected: Any, now: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """The differences from the expected answer: numbers that differ by more than a ratio of `tolerance`, other strings, and
    missing or other entries. A new field, which only `now` has, is no difference."""
    if isinstance(expected, Mapping) and isinstance(now, Mapping):
        for key, value in expected.items():
            if key in now:
                yield from differences(value, now[key], tolerance, f"{where}.{key}")
            else:
                yield f"{where}.{key} is missing"
    elif isinstance(expected, list) and isinstance(now, list) and len(expected) == len(now):
        for place, (before, after) in enumerate(zip(expected, now, strict=True)):
            yield from differences(before, after, tolerance, f"{where}[{place}]")
    elif _is_number(expected) and _is_number(now):
        if abs(expected - now) > tolerance * abs(expected):
            yield f"{where}: {expected!r} is now {now!r}"
    elif expected != now:
        yield f"{where}: {str(expected)[:200]} is now {str(now)[:200]}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
