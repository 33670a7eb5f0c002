"""Writes small models of every kind that people run with ONNX Runtime, to check how Hase handles them.

Networks are built here or by torchvision, with random weights that are the same each time; nothing is downloaded. Writes one
file per model into --out, and kinds.json with the kind, operator set and sizes of dynamic dimensions of each. A model that
can't be made is listed with the reason, and the others are still made. A second run makes what is missing.
The next step is evaluator.py --manifest.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from collections.abc import Callable, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hase.benchmark.ort.sizes_of_a_run import sizes_of_a_run
from hase.inference.evaluation.models import MANIFEST, ListedModel, Manifest, read_manifest
from hase.model_zoo.exporting.torch_models import build
from hase.recipes.kinds import graph_kinds
from hase.utils import cli, files
from hase.utils.errors import UserError
from hase.utils.fingerprint import package_version
from hase.utils.lazy import onnx, torch, torchvision
from hase.utils.logger import get_logger, progress
from hase.utils.processes import process_pool

log = get_logger("kinds")

PACKAGES = ("torch", "torchvision", "onnx", "onnxscript", "onnxruntime-gpu")
EXAMPLES = """
python recipes/kinds/make_models.py --out out/kinds
python recipes/kinds/make_models.py --out out/kinds --only unet bert_mask --jobs 1
python recipes/kinds/make_models.py --out out/kinds --large
"""


Write: TypeAlias = Callable[[Path], None]
CLASSIFIERS = ("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "vit_b_16", "swin_t",
               "convnext_tiny", "densenet121", "squeezenet1_1", "regnet_y_400mf", "shufflenet_v2_x1_0")
CLASSIFICATION = "torchvision classification"
TEXT, CACHE = {"batch": 1, "sequence": 128}, {"batch": 1, "past": 256}


@dataclass(frozen=True)
class Recipe:
    """How to make one model; `name`, `kind`, `dims` and `tiny` as in `ListedModel`."""

    name: str
    kind: str
    write: Write
    dims: Mapping[str, int] = field(default_factory=dict)
    tiny: bool = False
    sized_by_run: bool = False  # some sizes depend on data; the manifest gives those of a run
    large: bool = False  # it takes gigabytes of disk, so it is made only on request


def with_exporting(write: Callable[[Any, Path], None]) -> Write:
    """A writer that sets a fixed seed and calls `write` with the module `exporting`, imported only when a model is made."""
    def seeded(path: Path) -> None:
        from hase.recipes.kinds import exporting  # noqa: PLC0415 - needs a package that the options do not

        torch.manual_seed(0)
        torch.set_num_threads(1)
        write(exporting, path)

    return seeded


def exported(make: Callable[[Any], Any], opset: int = 17, **shapes: tuple[int, ...]) -> Write:
    """A writer that exports the network built by `make`, with float inputs of these shapes."""
    return with_exporting(lambda n, path: n.export(make(n), n.random_inputs(shapes), path, opset))


def classifier(name: str, opset: int = 17, size: int = 224) -> Write:
    return exported(lambda n: build(name, "fp32", (size, size)), opset, image=(1, 3, size, size))


def encoder(opset: int) -> Write:
    return exported(lambda n: n.vectors.transformer_encoder(), opset, input=(1, 64, 256))


def decoder_prefill(opset: int) -> Write:
    return with_exporting(lambda n, path: n.write_decoder_prefill(path, opset))


def decoder_token(opset: int) -> Write:
    return with_exporting(lambda n, path: n.write_decoder_token(path, opset))


def bert(opset: int, dynamic: bool = True) -> Write:
    return with_exporting(lambda n, path: n.write_bert(path, opset, dynamic))


def segmentation(name: str, size: int) -> Write:
    return exported(lambda n: n.segmentation_network(name), image=(1, 3, size, size))


def detector(name: str, size: int, **options: int) -> Write:
    return exported(lambda n: getattr(torchvision.models.detection, name)(weights=None, weights_backbone=None, **options), 12,
                    image=(1, 3, size, size))


def video(name: str, frames: int, size: int) -> Write:
    return exported(lambda n: getattr(torchvision.models.video, name)(weights=None), clip=(1, 3, frames, size, size))


def recurrent(kind: str) -> Write:
    return exported(lambda n: n.vectors.Recurrent(kind, 256, 2, False, 64, 32, last_step=True), x=(1, 50, 64))


def mlp() -> Write:
    return exported(lambda n: n.vectors.Mlp(512, 2048, 2048, 2048, 256), x=(8, 512))


SMALL = {"min_size": 256, "max_size": 256, "num_classes": 10}  # of a detector
RECIPES = (  # grouped by kind
    # classifiers of torchvision
    *(Recipe(f"classify_{name}", CLASSIFICATION, classifier(name, 18 if name == "resnet50" else 17)) for name in CLASSIFIERS),
    # decoders, encoders, and attention in other forms
    Recipe("decoder_prefill", "decoder, prefill", decoder_prefill(18), TEXT),
    Recipe("decoder_prefill_opset14", "decoder, prefill", decoder_prefill(14), TEXT),
    Recipe("decoder_token", "decoder, one token with cache", decoder_token(18), CACHE),
    Recipe("decoder_token_opset14", "decoder, one token with cache", decoder_token(14), CACHE),
    Recipe("bert_mask", "BERT with mask", bert(18), TEXT),
    Recipe("bert_mask_opset14", "BERT with mask", bert(14), TEXT),
    Recipe("bert_mask_static", "BERT with mask", bert(17, dynamic=False)),
    Recipe("einsum_attention", "Einsum", exported(lambda n: n.vectors.EinsumAttention(), x=(1, 96, 256))),
    # speech, 1-D convolutions and recurrent networks
    Recipe("speech_conformer", "speech", exported(lambda n: n.vectors.Conformer(), features=(1, 400, 80))),
    Recipe("speech_whisper_encoder", "speech", exported(lambda n: n.vectors.WhisperEncoder(), 18, spectrogram=(1, 80, 200))),
    Recipe("speech_wave_encoder", "speech", exported(lambda n: n.vectors.WaveEncoder(), samples=(1, 16000))),
    Recipe("speech_tcn", "1-D convolutions", exported(lambda n: n.vectors.Tcn(), x=(1, 128, 512))),
    *(Recipe(f"recurrent_{kind}", kind.upper(), recurrent(kind)) for kind in ("lstm", "gru", "rnn")),
    Recipe("recurrent_bilstm", "LSTM",
           exported(lambda n: n.vectors.Recurrent("lstm", 128, 2, True, 64, 32, last_step=True), x=(4, 40, 64))),
    # other element types than float32: quantised, half precision, bfloat16
    Recipe("qdq_resnet18", "QDQ int8", lambda p: graph_kinds.write_static_int8(p, classifier("resnet18", 17, 128), True)),
    Recipe("qdq_mobilenet_v2", "QDQ int8",
           lambda p: graph_kinds.write_static_int8(p, classifier("mobilenet_v2", 17, 128), True)),
    Recipe("qdq_encoder", "QDQ int8", lambda p: graph_kinds.write_static_int8(p, encoder(17), True)),
    Recipe("qoperator_resnet18", "QOperator int8",
           lambda p: graph_kinds.write_static_int8(p, classifier("resnet18", 17, 128), False)),
    Recipe("qoperator_mlp", "QOperator int8", lambda p: graph_kinds.write_static_int8(p, mlp(), False)),
    Recipe("dynamic_int8_encoder", "dynamic int8", lambda p: graph_kinds.write_dynamic_int8(p, encoder(17))),
    Recipe("dynamic_int8_mlp", "dynamic int8", lambda p: graph_kinds.write_dynamic_int8(p, mlp())),
    Recipe("mixed_fp16_resnet18", "mixed fp16", lambda p: graph_kinds.write_mixed_fp16(p, classifier("resnet18", 17, 160))),
    Recipe("mixed_fp16_encoder", "mixed fp16", lambda p: graph_kinds.write_mixed_fp16(p, encoder(17))),
    Recipe("bf16_weights", "bf16", graph_kinds.write_bf16),
    Recipe("bf16_whole", "bf16", lambda p: graph_kinds.write_bf16(p, whole=True)),
    # detectors and segmentation, and other models whose sizes depend on data
    Recipe("detect_ssdlite320", "detector", detector("ssdlite320_mobilenet_v3_large", 320), sized_by_run=True),
    Recipe("detect_retinanet", "detector", detector("retinanet_resnet50_fpn", 256, **SMALL), sized_by_run=True),
    Recipe("detect_fasterrcnn", "detector", detector("fasterrcnn_mobilenet_v3_large_320_fpn", 256, **SMALL), sized_by_run=True),
    Recipe("detect_one_stage_nms", "detector", graph_kinds.write_nms_detector, sized_by_run=True),
    Recipe("rows_by_nonzero", "sizes that depend on data", graph_kinds.write_nonzero, sized_by_run=True),
    Recipe("segment_fcn_resnet50", "segmentation", segmentation("fcn_resnet50", 128)),
    Recipe("segment_lraspp", "segmentation", segmentation("lraspp_mobilenet_v3_large", 224)),
    # networks of images and volumes
    Recipe("unet", "U-Net", exported(lambda n: n.images.UNet(32, 2, True, channels=3), image=(1, 3, 128, 128))),
    Recipe("unet_opset20", "U-Net", exported(lambda n: n.images.UNet(32, 2, True, channels=3), 20, image=(1, 3, 96, 96))),
    Recipe("video_r3d_18", "3-D", video("r3d_18", 4, 64)),
    Recipe("video_mc3_18", "3-D", video("mc3_18", 4, 64)),
    Recipe("volume_unet", "3-D", exported(lambda n: n.images.VolumeNet(), volume=(1, 1, 32, 32, 32))),
    Recipe("group_norm_opset21", "GroupNorm", graph_kinds.write_group_norm_21),
    Recipe("instance_norm_style", "InstanceNorm", exported(lambda n: n.images.StyleNet(), image=(1, 3, 128, 128))),
    Recipe("diffusion_attention", "diffusion attention", with_exporting(lambda n, p: n.write_diffusion(p))),
    Recipe("super_resolution", "super-resolution",
           exported(lambda n: n.images.SuperResolution(48, 4, 3, plain=True), image=(1, 3, 64, 64))),
    Recipe("grid_sample", "GridSample", exported(lambda n: n.images.SpatialTransformer(), image=(1, 3, 128, 128))),
    Recipe("scalar_outputs", "scalar outputs", exported(lambda n: n.images.ScalarLoss(), image=(1, 3, 96, 96))),
    Recipe("several_in_and_out", "several inputs and outputs",
           exported(lambda n: n.images.Pyramid(), left=(1, 3, 128, 128), right=(1, 3, 128, 128), extra=(1, 16))),
    # loops and branches
    Recipe("loop_constant_trips", "Loop", graph_kinds.write_loop),
    Recipe("loop_trips_by_input", "Loop", graph_kinds.write_loop_by_input),
    Recipe("scan", "Scan", graph_kinds.write_scan),
    Recipe("if_by_input", "If", graph_kinds.write_if),
    Recipe("if_by_data", "If", graph_kinds.write_gated_if),
    # recommenders, pipelines of scikit-learn, linear layers
    Recipe("scatter_nd", "ScatterND", with_exporting(lambda n, p: n.write_memory_update(p))),
    Recipe("experts_topk", "ScatterElements and TopK", exported(lambda n: n.vectors.Experts(), x=(64, 128))),
    Recipe("recommender_dlrm", "recommender", with_exporting(lambda n, p: n.write_recommender(p)), {"batch": 64}),
    Recipe("sklearn_forest", "scikit-learn pipeline", graph_kinds.write_forest, {"rows": 64}),
    Recipe("sklearn_linear", "scikit-learn pipeline", graph_kinds.write_linear_pipeline, {"rows": 256}, tiny=True),
    Recipe("mlp", "MLP", mlp()),
    # the same networks at other operator sets, and as ONNX Runtime saves them
    *(Recipe(f"opset{opset}_mobilenet_v2", "operator sets 11 to 24", classifier("mobilenet_v2", opset, 160))
      for opset in (11, 13, 15, 18, 20, 22, 24)),
    *(Recipe(f"opset{opset}_encoder", "operator sets 11 to 24", encoder(opset)) for opset in (12, 14, 16, 17, 19, 21, 23)),
    Recipe("saved_all_resnet18", "saved by ONNX Runtime",
           lambda p: graph_kinds.write_saved_by_ort(p, classifier("resnet18", 17, 160), "all")),
    Recipe("saved_extended_resnet18", "saved by ONNX Runtime",
           lambda p: graph_kinds.write_saved_by_ort(p, classifier("resnet18", 17, 160), "extended")),
    Recipe("saved_extended_bert", "saved by ONNX Runtime",
           lambda p: graph_kinds.write_saved_by_ort(p, bert(17, dynamic=False), "extended")),
    # the smallest and the largest models
    Recipe("tiny_add", "tiny", graph_kinds.write_tiny, tiny=True),
    Recipe("tiny_mlp", "tiny", exported(lambda n: n.vectors.Mlp(16, 32, 4), x=(1, 16)), tiny=True),
    Recipe("external_2_4_gb", "2.4 GB of external data", graph_kinds.write_large, large=True),
)


def make(name: str, folder: Path) -> ListedModel | str:
    """Makes one model in this process; returns its description, or why it failed."""
    recipe = next(candidate for candidate in RECIPES if candidate.name == name)
    path = folder / f"{name}.onnx"
    try:
        if recipe.large:
            recipe.write(path)  # its weights are in a second file, which it names
        else:
            with files.replacing(path) as temporary:
                recipe.write(temporary)
        proto = onnx.load(path, load_external_data=False)
        dims = {**recipe.dims, **(sizes_of_a_run(path, recipe.dims) if recipe.sized_by_run else {})}
    except Exception as error:  # noqa: BLE001 - whatever torch, torchvision or a quantiser raises, the other models go on
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    opset = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    return ListedModel(name=name, file=path.name, kind=recipe.kind, opset=opset, dims=dims, tiny=recipe.tiny)


def make_all(folder: Path, only: list[str], large: bool, jobs: int) -> Manifest:
    """Makes the requested models that are missing, and writes the manifest after each."""
    names = [recipe.name for recipe in RECIPES]
    if unknown := sorted(set(only) - set(names)):
        raise UserError(f"--only {' '.join(unknown)}: no such model; there are {', '.join(names)}")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [recipe.name for recipe in RECIPES if (not only or recipe.name in only) and (large or not recipe.large)]
    earlier = read_manifest(folder) if (folder / MANIFEST).exists() else None
    made = {model.name: model for model in earlier.models
            if model.name in names and (folder / model.file).exists()} if earlier else {}
    skipped = {name: reason for name, reason in earlier.skipped.items()
               if name in names and name not in wanted} if earlier else {}
    versions = {name: package_version(name) for name in PACKAGES}

    def manifest() -> Manifest:
        return Manifest(versions=versions, models=tuple(made[name] for name in names if name in made), skipped=skipped)

    with process_pool(jobs) as pool:
        running = {name: pool.submit(make, name, folder) for name in wanted if name not in made}
        for name, future in progress(list(running.items()), "making"):
            try:
                outcome = future.result()
            except BrokenProcessPool:
                outcome = "its process, or another one, died; run the same command again to make the others"
            if isinstance(outcome, ListedModel):
                made[name] = outcome
            else:
                skipped[name] = outcome
                log.warning("%s: %s", name, outcome)
            files.write_json(folder / MANIFEST, manifest())
    complete = manifest()
    files.write_json(folder / MANIFEST, complete)
    return complete


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the models go")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="make these alone")
    parser.add_argument("--large", action="store_true", help="also the one of 2.4 GB")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes that make them (default: 1)")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error("--jobs must be positive")
    cli.start(args)
    manifest = make_all(args.out, args.only, args.large, args.jobs)
    cli.print_rows([{"model": model.name, "kind": model.kind, "opset": model.opset,
                     "MB": round((args.out / model.file).stat().st_size / 1e6, 2)} for model in manifest.models]
                   + [{"model": name, "kind": "skipped", "opset": None, "MB": None} for name in manifest.skipped], args.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
