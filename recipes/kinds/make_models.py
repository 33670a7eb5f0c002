"""Writes small models of every kind that people run with ONNX Runtime, to see what Hase makes of them.

Networks are made here or by torchvision, with random weights that are the same each time; nothing is downloaded. Writes a file
a model into --out, and kinds.json beside them: each one's kind, operator set and the sizes of its dynamic dimensions. A model
that can't be made costs only itself: it is listed with the reason. A second run makes what is missing. `judge.py` goes on.
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

from benchmark.runtimes.ort.sizes_of_a_run import sizes_of_a_run
from recipes.kinds.manifest import MANIFEST, MadeModel, Manifest, load_manifest
from utils import cli, files
from utils.errors import UserError
from utils.fingerprint import package_version
from utils.lazy import onnx, torch
from utils.logger import get_logger
from utils.processes import process_pool

log = get_logger("kinds")

Write: TypeAlias = Callable[[Path], None]
PACKAGES = ("torch", "torchvision", "onnx", "onnxscript", "onnxruntime-gpu")
CLASSIFIERS = ("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_large", "efficientnet_b0", "vit_b_16", "swin_t",
               "convnext_tiny", "densenet121", "squeezenet1_1", "regnet_y_400mf", "shufflenet_v2_x1_0")
CLASSIFICATION = "torchvision classification"
EXAMPLES = """
python recipes/kinds/make_models.py --out out/kinds
python recipes/kinds/make_models.py --out out/kinds --only unet bert_mask --jobs 1
python recipes/kinds/make_models.py --out out/kinds --large
"""


@dataclass(frozen=True)
class Recipe:
    """How to make one model.

    Attributes:
        name, kind, dims, tiny: see `MadeModel`.
        write: writes the file at a path.
        sized_by_run: sizes in it depend on data; the manifest gives those of a run with the inputs that measuring uses.
        large: takes gigabytes of disk, so it is made on request.
    """

    name: str
    kind: str
    write: Write
    dims: Mapping[str, int] = field(default_factory=dict)
    tiny: bool = False
    sized_by_run: bool = False
    large: bool = False


def by(write: Callable[[Any, Path], None]) -> Write:
    """A writer that gets torch_kinds, which is imported and seeded when a model is made and not before."""
    def seeded(path: Path) -> None:
        from recipes.kinds import torch_kinds

        torch.manual_seed(0)
        torch.set_num_threads(1)
        write(torch_kinds, path)

    return seeded


def recipes() -> list[Recipe]:
    """Every model, those of one kind together."""
    from recipes.kinds import conversions as c
    from recipes.kinds import graph_kinds as g

    def of(make: Callable[[Any], Any], opset: int = 17, **shapes: tuple[int, ...]) -> Write:
        """Exports the network that `make` gets out of torch_kinds, with float inputs of these shapes."""
        return by(lambda t, path: t.export(make(t), t.random_inputs(shapes), path, opset))

    def classifier(name: str, opset: int = 17, size: int = 224) -> Write:
        return by(lambda t, path: t.write_classifier(path, name, opset, size))

    def encoder(opset: int) -> Write:
        return by(lambda t, path: t.write_encoder(path, opset))

    def recurrent(kind: str) -> Write:
        return of(lambda t: t.Recurrent(kind), x=(1, 50, 64))

    text, cache = {"batch": 1, "sequence": 128}, {"batch": 1, "past": 256}
    mlp = of(lambda t: t.Mlp(512, 2048, 2048, 2048, 256), x=(8, 512))
    return [
        *(Recipe(f"classify_{name}", CLASSIFICATION, classifier(name, 18 if name == "resnet50" else 17))
          for name in CLASSIFIERS),
        Recipe("decoder_prefill", "decoder, prefill", by(lambda t, p: t.write_decoder_prefill(p)), text),
        Recipe("decoder_prefill_opset14", "decoder, prefill", by(lambda t, p: t.write_decoder_prefill(p, 14)), text),
        Recipe("decoder_token", "decoder, one token with cache", by(lambda t, p: t.write_decoder_token(p)), cache),
        Recipe("decoder_token_opset14", "decoder, one token with cache", by(lambda t, p: t.write_decoder_token(p, 14)), cache),
        Recipe("bert_mask", "BERT with mask", by(lambda t, p: t.write_bert(p)), text),
        Recipe("bert_mask_opset14", "BERT with mask", by(lambda t, p: t.write_bert(p, 14)), text),
        Recipe("bert_mask_static", "BERT with mask", by(lambda t, p: t.write_bert(p, 17, dynamic=False))),
        Recipe("speech_conformer", "speech", of(lambda t: t.Conformer(), features=(1, 400, 80))),
        Recipe("speech_whisper_encoder", "speech", of(lambda t: t.WhisperEncoder(), 18, spectrogram=(1, 80, 200))),
        Recipe("speech_wave_encoder", "speech", of(lambda t: t.WaveEncoder(), samples=(1, 16000))),
        Recipe("speech_tcn", "1-D convolutions", of(lambda t: t.Tcn(), x=(1, 128, 512))),
        Recipe("qdq_resnet18", "QDQ int8", lambda p: c.write_static_int8(p, classifier("resnet18", 17, 128), True)),
        Recipe("qdq_mobilenet_v2", "QDQ int8", lambda p: c.write_static_int8(p, classifier("mobilenet_v2", 17, 128), True)),
        Recipe("qdq_encoder", "QDQ int8", lambda p: c.write_static_int8(p, encoder(17), True)),
        Recipe("qoperator_resnet18", "QOperator int8",
               lambda p: c.write_static_int8(p, classifier("resnet18", 17, 128), False)),
        Recipe("qoperator_mlp", "QOperator int8", lambda p: c.write_static_int8(p, mlp, False)),
        Recipe("dynamic_int8_encoder", "dynamic int8", lambda p: c.write_dynamic_int8(p, encoder(17))),
        Recipe("dynamic_int8_mlp", "dynamic int8", lambda p: c.write_dynamic_int8(p, mlp)),
        Recipe("mixed_fp16_resnet18", "mixed fp16", lambda p: c.write_mixed_fp16(p, classifier("resnet18", 17, 160))),
        Recipe("mixed_fp16_encoder", "mixed fp16", lambda p: c.write_mixed_fp16(p, encoder(17))),
        Recipe("bf16_weights", "bf16", g.write_bf16),
        Recipe("bf16_whole", "bf16", lambda p: g.write_bf16(p, whole=True)),
        Recipe("detect_ssdlite320", "detector",
               by(lambda t, p: t.write_detector(p, "ssdlite320_mobilenet_v3_large", 320)), sized_by_run=True),
        Recipe("detect_retinanet", "detector", by(lambda t, p: t.write_detector(
            p, "retinanet_resnet50_fpn", 256, min_size=256, max_size=256, num_classes=10)), sized_by_run=True),
        Recipe("detect_fasterrcnn", "detector", by(lambda t, p: t.write_detector(
            p, "fasterrcnn_mobilenet_v3_large_320_fpn", 256, min_size=256, max_size=256, num_classes=10)), sized_by_run=True),
        Recipe("detect_one_stage_nms", "detector", g.write_nms_detector, sized_by_run=True),
        Recipe("rows_by_nonzero", "sizes that depend on data", g.write_nonzero, sized_by_run=True),
        Recipe("segment_fcn_resnet50", "segmentation", by(lambda t, p: t.write_segmentation(p, "fcn_resnet50", 128))),
        Recipe("segment_lraspp", "segmentation", by(lambda t, p: t.write_segmentation(p, "lraspp_mobilenet_v3_large", 224))),
        *(Recipe(f"recurrent_{kind}", kind.upper(), recurrent(kind))
          for kind in ("lstm", "gru", "rnn")),
        Recipe("recurrent_bilstm", "LSTM", of(lambda t: t.Recurrent("lstm", 128, 2, True), x=(4, 40, 64))),
        Recipe("unet", "U-Net", of(lambda t: t.UNet(), image=(1, 3, 128, 128))),
        Recipe("unet_opset20", "U-Net", of(lambda t: t.UNet(), 20, image=(1, 3, 96, 96))),
        Recipe("video_r3d_18", "3-D", by(lambda t, p: t.write_video(p, "r3d_18", 4, 64))),
        Recipe("video_mc3_18", "3-D", by(lambda t, p: t.write_video(p, "mc3_18", 4, 64))),
        Recipe("volume_unet", "3-D", of(lambda t: t.VolumeNet(), volume=(1, 1, 32, 32, 32))),
        Recipe("group_norm_opset21", "GroupNorm", g.write_group_norm_21),
        Recipe("instance_norm_style", "InstanceNorm", of(lambda t: t.StyleNet(), image=(1, 3, 128, 128))),
        Recipe("diffusion_attention", "diffusion attention", by(lambda t, p: t.write_diffusion(p))),
        Recipe("super_resolution", "super-resolution", of(lambda t: t.SuperResolution(), image=(1, 3, 64, 64))),
        Recipe("grid_sample", "GridSample", of(lambda t: t.SpatialTransformer(), image=(1, 3, 128, 128))),
        Recipe("scatter_nd", "ScatterND", by(lambda t, p: t.write_memory_update(p))),
        Recipe("experts_topk", "ScatterElements and TopK", of(lambda t: t.Experts(), x=(64, 128))),
        Recipe("loop_constant_trips", "Loop", g.write_loop),
        Recipe("loop_trips_by_input", "Loop", g.write_loop_by_input),
        Recipe("scan", "Scan", g.write_scan),
        Recipe("if_by_input", "If", g.write_if),
        Recipe("if_by_data", "If", g.write_gated_if),
        Recipe("einsum_attention", "Einsum", of(lambda t: t.EinsumAttention(), x=(1, 96, 256))),
        Recipe("recommender_dlrm", "recommender", by(lambda t, p: t.write_recommender(p)), {"batch": 64}),
        Recipe("sklearn_forest", "scikit-learn pipeline", g.write_forest, {"rows": 64}),
        Recipe("sklearn_linear", "scikit-learn pipeline", g.write_linear_pipeline, {"rows": 256}, tiny=True),
        Recipe("scalar_outputs", "scalar outputs", of(lambda t: t.ScalarLoss(), image=(1, 3, 96, 96))),
        Recipe("several_in_and_out", "several inputs and outputs",
               of(lambda t: t.Pyramid(), left=(1, 3, 128, 128), right=(1, 3, 128, 128), extra=(1, 16))),
        *(Recipe(f"opset{opset}_mobilenet_v2", "operator sets 11 to 24", classifier("mobilenet_v2", opset, 160))
          for opset in (11, 13, 15, 18, 20, 22, 24)),
        *(Recipe(f"opset{opset}_encoder", "operator sets 11 to 24", encoder(opset))
          for opset in (12, 14, 16, 17, 19, 21, 23)),
        Recipe("saved_all_resnet18", "saved by ONNX Runtime",
               lambda p: c.write_saved_by_ort(p, classifier("resnet18", 17, 160), "all")),
        Recipe("saved_extended_resnet18", "saved by ONNX Runtime",
               lambda p: c.write_saved_by_ort(p, classifier("resnet18", 17, 160), "extended")),
        Recipe("saved_extended_bert", "saved by ONNX Runtime",
               lambda p: c.write_saved_by_ort(p, by(lambda t, q: t.write_bert(q, 17, dynamic=False)), "extended")),
        Recipe("mlp", "MLP", mlp),
        Recipe("tiny_add", "tiny", g.write_tiny, tiny=True),
        Recipe("tiny_mlp", "tiny", of(lambda t: t.Mlp(16, 32, 4), x=(1, 16)), tiny=True),
        Recipe("external_2_4_gb", "2.4 GB of external data", g.write_large, large=True),
    ]


def make(name: str, folder: Path) -> MadeModel | str:
    """Makes one model in this process; what it is, or why it could not be made."""
    recipe = next(one for one in recipes() if one.name == name)
    path = folder / f"{name}.onnx"
    try:
        if recipe.large:
            recipe.write(path)  # its weights lie beside it, by name
        else:
            with files.replacing(path) as temporary:
                recipe.write(temporary)
        proto = onnx.load(path, load_external_data=False)
        dims = {**recipe.dims, **(sizes_of_a_run(path, recipe.dims) if recipe.sized_by_run else {})}
    except Exception as error:  # noqa: BLE001 - whatever torch, torchvision or a quantiser stumbles on costs one model
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    opset = next(entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx"))
    return MadeModel(name=name, file=path.name, kind=recipe.kind, opset=opset, dims=dims, tiny=recipe.tiny)


def make_all(folder: Path, only: list[str], large: bool, jobs: int) -> Manifest:
    """Makes what is missing of the models asked for, and writes the manifest after each.

    Raises:
        UserError: there is no recipe of a name in `only`.
    """
    every = recipes()
    names = [recipe.name for recipe in every]
    if unknown := sorted(set(only) - set(names)):
        raise UserError(f"--only {' '.join(unknown)}: no such model; there are {', '.join(names)}")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [recipe.name for recipe in every if (not only or recipe.name in only) and (large or not recipe.large)]
    before = load_manifest(folder) if (folder / MANIFEST).exists() else None
    made = {one.name: one for one in before.models if one.name in names and (folder / one.file).exists()} if before else {}
    skipped = {name: why for name, why in before.skipped.items() if name in names and name not in wanted} if before else {}
    versions = {name: package_version(name) for name in PACKAGES}

    def manifest() -> Manifest:
        return Manifest(versions=versions, models=tuple(made[name] for name in names if name in made), skipped=skipped)

    with process_pool(jobs) as pool:
        running = {name: pool.submit(make, name, folder) for name in wanted if name not in made}
        for name, future in cli.track(list(running.items()), "making"):
            try:
                done = future.result()
            except BrokenProcessPool:
                done = "its process, or one beside it, died; run the same command again to make the others"
            if isinstance(done, MadeModel):
                made[name] = done
            else:
                skipped[name] = done
                log.warning("%s: %s", name, done)
            files.write_json(folder / MANIFEST, manifest())
    found = manifest()
    files.write_json(folder / MANIFEST, found)
    return found


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
    found = make_all(args.out, args.only, args.large, args.jobs)
    cli.print_rows([{"model": model.name, "kind": model.kind, "opset": model.opset,
                     "MB": round((args.out / model.file).stat().st_size / 1e6, 2)} for model in found.models]
                   + [{"model": name, "kind": "skipped", "opset": None, "MB": None} for name in found.skipped], args.json)
    return 0


if __name__ == "__main__":
    cli.run(main)
