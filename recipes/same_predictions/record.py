"""Records predictions after an intended change; tests/recipes/test_same_predictions.py compares later ones with them.

Runs many commands that predict, prints which answers changed, and writes answers.json.xz in the same folder. All commands run
in this process, in a workspace that is unpacked from records.tar.xz (records of many kinds of models, for CUDA and for a CPU)
and cpu.tar.xz (a small dataset of a CPU, the records of its models, and predictors trained on it), so that neither a GPU nor a
model file is needed. With --models, it first makes new records of models; with --cpu, it first packs the workspace of a CPU's
dataset. `run.sh` makes both.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import contextlib
import importlib
import io
import json
import logging
import lzma
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np

from hase.learned import target_files
from hase.ort_analysis.graph.analysis import analyze
from hase.records.probe_reading import ProbedRuns, ProbeReading
from hase.utils import cli, files
from hase.utils.files import pack, unpack
from hase.utils.logger import get_logger

log = get_logger("same_predictions")
MAX_SHOWN_CHANGES = 20
NUMBERS = (int, float)  # types of JSON's numbers
EXAMPLES = """
python recipes/same_predictions/record.py
python recipes/same_predictions/record.py --check
python recipes/same_predictions/record.py --check --exact
python recipes/same_predictions/record.py --models out/kinds --cpu out/same_predictions/cpu
"""

HERE = Path(__file__).resolve().parent
RECORDS, CPU_WORKSPACE, ANSWERS = (HERE / name for name in ("records.tar.xz", "cpu.tar.xz", "answers.json.xz"))
CPU_CONFIG = HERE / "training.yaml"
TRACE = "trace.json"
SENTENCES = ("warnings", "holds_for", "unknown_because")  # fields of an answer whose sentences may change
# A ratio. Between kinds of CPU (AVX2, AVX-512), numpy's exp and log differ in the last of 16 digits, and answers by up to
# 3.4e-16; on one machine they are always the same, with any number of threads.
TOLERANCE = 1e-12

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
    """The commands whose answers must stay the same, to run in a workspace from `unpack_workspace`."""
    cuda, cpu = f"{PREDICT}/cuda/{{}}.json --target nvidia-h200", f"{PREDICT}/cpu/{{}}.json --target cpu-avx512"
    commands = [command.format(name) for name in RECORDED
                for command in (cuda, f"{cpu} --force" if "fp16" in name else cpu)]
    commands += [f"{cuda.format(name)} {options}" for name, options in (
        ("resnet18@batch=16", "--strict"), ("bert_mask_static", "--strict"), ("mobilenet_v3_small@batch=4", "--strict"),
        ("resnet18@batch=1", "--io host"), ("resnet18@batch=64", "--io host --strict"),
        ("resnet18@batch=1", "--cuda-graph"), ("mobilenet_v3_small@batch=4", "--cuda-graph --strict"),
        ("resnet18@batch=16", "--metrics busy.json"), ("bert_mask@batch=2,sequence=64,dynamic", "--metrics busy.json"),
        ("qoperator_mlp", "--metrics busy.json"), ("resnet18@batch=16", "--probe probe.json"),
        ("detect_one_stage_nms", "--probe probe.json"), ("resnet18@batch=1", "--probe probe.json --slo-ms 2"),
        ("resnet18@batch=16", "--slo-ms 1.5 --slo-percentile 99"), ("resnet18@batch=1", "--trace trace.json"),
        ("scan", "--trace trace.json"), ("qoperator_mlp", "--trace trace.json"))]
    commands += [f"{CURVE}/{name}.json" for name in ("resnet18@batch=16", "qoperator_mlp")]
    commands.append(f"{PAIR}/resnet18@batch=1.json --beside-model records/cuda/bert_mask_static.json")
    commands += [f"{cpu.format(name)} {options}" for name, options in (
        ("resnet18@batch=1", "--strict"), ("bert_mask_static", "--strict"), ("resnet18@batch=1", "--io host"),
        ("resnet18@batch=1", "--metrics busy_cpu.json"), ("bert_mask@batch=2,sequence=64,dynamic", "--metrics busy_cpu.json"),
        ("resnet18@batch=1", "--slo-ms 5"), ("mobilenet_v3_small@batch=4", "--trace trace.json"))]
    measured = f"{PREDICT.removesuffix(' records')} ort_analysis/ort_kernel_record/cpu-avx512-ort1.31-all"
    commands += [f"{measured}/{name}.json --target cpu-avx512{options}"
                 for name in ("squeezenet1_1_fp32_b4_64x64", "mnasnet0_5_fp32_b1_64x64")
                 for options in ("", " --strict", " --io host", " --metrics busy_cpu.json")]
    return commands


def unpack_workspace(folder: Path) -> Path:
    """Unpacks the workspace of the questions into `folder`, and returns it."""
    for archive in (RECORDS, CPU_WORKSPACE):
        unpack(archive, folder)
    (folder / "no_prometheus.yaml").write_text("prometheus: {url: null}\n", encoding="utf-8")
    (folder / "busy.json").write_text('{"DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.6, "DCGM_FI_DEV_GPU_UTIL": 60}', encoding="utf-8")
    predictors = next(folder.glob(f"training/predictors/*/{target_files.PREDICTORS.name}"))
    busy_cpu = {name: high for name, (_, high) in files.read_json(predictors)["load_range"].items()}
    (folder / "busy_cpu.json").write_text(json.dumps(busy_cpu), encoding="utf-8")
    files.write_json(folder / "probe.json", synthetic_reading())
    return folder


def synthetic_reading() -> ProbeReading:
    """A plausible reading of the sharing probe beside a background that is busy for 8 of every 20 ms."""
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


def run_script(script: str, *options: str) -> tuple[Any, str]:
    """Runs a script in this process and folder; returns its exit status and what it prints."""
    main = importlib.import_module("hase." + script.removesuffix(".py").replace("/", ".")).main
    out = io.StringIO()
    with mock.patch.object(sys, "argv", [script, "--workspace", ".", "--quiet", *options]), contextlib.redirect_stdout(out):
        return main(), out.getvalue()


def ask(question: str) -> Any:
    """Runs a command; returns its JSON output with its trace, if any. Raises RuntimeError if the command fails."""
    script, *options = shlex.split(question)
    status, output = run_script(script, *options)
    if status not in (0, 4):  # 4: a latency objective is missed
        raise RuntimeError(f"{question}: exit status {status}")
    answer = json.loads(output)
    if TRACE in options:
        answer.append(files.read_json(Path(TRACE))["traceEvents"])
    return comparable_answer(answer)


def comparable_answer(answer: Any) -> Any:
    """The answer without sentences, and with kernels sorted by name, since their order by time may depend on the last digit."""
    if isinstance(answer, dict):
        return {key: sorted(map(comparable_answer, value), key=lambda kernel: (kernel["id"], kernel["provider"]))
                if key == "kernels" else comparable_answer(value) for key, value in answer.items() if key not in SENTENCES}
    return [comparable_answer(value) for value in answer] if isinstance(answer, list) else answer


def ask_all() -> dict[str, Any]:
    """The current answer to every question, and to some of them again after a new training."""
    logging.disable(logging.WARNING)  # for good, since commands log to files in a folder that is then deleted
    no_local_target = mock.patch("hase.inference.prediction.targets.local_targets", return_value=())  # as on any machine
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(unpack_workspace(Path(folder))), no_local_target:
        answers = {question: ask(question) for question in questions()}
        run_script("training/train_kernel_model.py", "--config", str(CPU_CONFIG))
        run_script("training/fit_composition.py")
        again = [question for question in answers if "mnasnet" in question or "squeezenet" in question]
        return answers | {f"{question} (learned anew)": ask(question) for question in again}


def differences(expected: Any, now: Any, tolerance: float, where: str = "") -> Iterator[str]:
    """Describes differences from the expected answer: other numbers (beyond the ratio `tolerance`) or strings, missing entries.
    """
    if isinstance(expected, Mapping) and isinstance(now, Mapping):
        for key, value in expected.items():
            if key in now:
                yield from differences(value, now[key], tolerance, f"{where}.{key}")
            else:
                yield f"{where}.{key} is missing"
    elif isinstance(expected, list) and isinstance(now, list) and len(expected) == len(now):
        for index, (before, after) in enumerate(zip(expected, now, strict=True)):
            yield from differences(before, after, tolerance, f"{where}[{index}]")
    elif type(expected) in NUMBERS and type(now) in NUMBERS:
        if abs(expected - now) > tolerance * abs(expected):
            yield f"{where}: {expected!r} is now {now!r}"
    elif expected != now:
        yield f"{where}: {str(expected)[:200]} is now {str(now)[:200]}"


def read_answers() -> dict[str, Any]:
    """The recorded answers; empty if there are none."""
    if not ANSWERS.exists():
        return {}
    answers: dict[str, Any] = json.loads(lzma.decompress(ANSWERS.read_bytes()))
    return answers


def write_answers(answers: dict[str, Any]) -> None:
    files.write_bytes(ANSWERS, lzma.compress(json.dumps(answers, separators=(",", ":")).encode(), preset=9))


def make_records(models: Path) -> Iterator[tuple[str, bytes]]:
    """Makes the records of the questions' models, for both devices; yields the name and content of each."""
    for device in ("cuda", "cpu"):
        for name in RECORDED:
            stem, _, sizes = name.partition("@")
            dims = {key: int(size) for key, size in (part.split("=") for part in sizes.split(",") if "=" in part)}
            record = analyze(models / f"{stem}.onnx", device, dims, static=name in STATIC)
            log.info("%s, %s: %d nodes, %d kernels", name, device, len(record.nodes), len(record.kernels))
            yield f"records/{device}/{name}.json", json.dumps(files.with_digest(record.model_dump(mode="json"))).encode()


def changes(before: dict[str, Any], now: dict[str, Any], tolerance: float) -> list[str]:
    """Describes the differences between recorded and current answers; new questions are no change."""
    return [f"{question}: {line}" for question, answer in before.items() for line in (
        differences(answer, now[question], tolerance) if question in now else ["is no longer asked"])]


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--models", type=Path, metavar="DIR", help="first make new records of the models in this folder")
    parser.add_argument("--list-models", action="store_true", help="print the models of recipes/kinds that --models needs")
    parser.add_argument("--cpu", type=Path, metavar="DIR", help="first pack this workspace of a CPU's dataset")
    parser.add_argument("--check", action="store_true", help="record nothing; exit status 1 if an answer changed")
    parser.add_argument("--exact", action="store_true", help=f"count also changes below a ratio of {TOLERANCE:g}: there are "
                        "none on the kind of CPU that recorded the answers")
    args = parser.parse_args()
    cli.start(args)
    if args.list_models:
        names = dict.fromkeys(name.partition("@")[0] for name in RECORDED)
        print(" ".join(name for name in names if name not in FROM_TORCHVISION))
        return 0
    if args.models:
        pack(RECORDS, sorted(make_records(args.models)))
    if args.cpu:
        paths = [path for folder in ("benchmark/dataset", "ort_analysis/ort_kernel_record", "training/predictors")
                 for path in (args.cpu / folder).glob("*/*") if path.is_file() and not path.name.startswith(".")]
        pack(CPU_WORKSPACE, sorted((str(path.relative_to(args.cpu)), path.read_bytes()) for path in paths))
    now = ask_all()
    changed = changes(read_answers(), now, 0.0 if args.exact else TOLERANCE)
    cli.print_rows([{"change": line} for line in changed[:MAX_SHOWN_CHANGES]], args.json)
    print(f"{len(now)} questions asked; {len(changed)} numbers or words differ from those recorded", file=sys.stderr)
    if args.check:
        return 1 if changed else 0
    write_answers(now)
    return 0


if __name__ == "__main__":
    cli.run(main)
