"""Builds language models with random weights as people deploy them, with the builder of onnxruntime-genai. Downloads nothing.

Reads networks.yaml. Writes a folder for each network and precision: `<workspace>/llm/models/<network>-<precision>`. Folders
that are there are kept. Needs requirements-llm.txt, of which only the builder's Python files are used here.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a file: put the repo root first, as `python -m` does
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import importlib
import importlib.util
import logging
import os
import shutil
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from hase.inference.llm.language_model import FILE as GENAI_CONFIG
from hase.recipes.llm.networks import NETWORKS_FILE, PRECISIONS, LanguageNetwork, LanguageNetworks, model_folder
from hase.utils import cli, files
from hase.utils.config import read_config
from hase.utils.errors import UserError
from hase.utils.lazy import onnx_ir, torch, transformers
from hase.utils.logger import get_logger
from hase.utils.processes import process_pool

EXAMPLES = """
python recipes/llm/make_models.py --workspace out/llm --network smollm --precision int4
python recipes/llm/make_models.py --workspace out/llm --jobs 4
"""
SPREAD = 0.02  # standard deviation of the weights, as transformers starts them
REPEATED = 1 << 22  # random numbers, which larger weights repeat: drawing billions takes minutes
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CUDA = {"fp16": ("FLOAT16", "FLOAT16"), "bf16": ("BFLOAT16", "BFLOAT16"), "int4": ("FLOAT16", "INT4"),
        "fp32": ("FLOAT", "FLOAT")}  # the types of inputs and outputs, and of weights
CPU = {"int4": ("FLOAT", "INT4"), "fp32": ("FLOAT", "FLOAT")}
log = get_logger("llm")


def random_network(config: Any) -> Any:
    """The network of a transformers config, with random weights in half precision."""
    torch.manual_seed(0)
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    network.to_empty(device="cpu")
    numbers = (torch.randn(REPEATED) * SPREAD).half()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
            else:
                flat = parameter.data.view(-1)
                for start in range(0, flat.numel(), REPEATED):
                    part = flat[start:start + REPEATED]
                    part.copy_(numbers[:part.numel()])
    network.tie_weights()
    return network.eval()


def build(network: LanguageNetwork, precision: str, device: str, folder: Path, threads: int | None = None) -> None:
    """Builds one model into a folder. Raises UserError if the builder lacks this class or precision."""
    spec = importlib.util.find_spec("onnxruntime_genai")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the builder of onnxruntime-genai is not installed; requirements-llm.txt says how")
    sys.path.insert(0, str(Path(spec.submodule_search_locations[0]) / "models"))
    builders = importlib.import_module("builders")
    config = getattr(transformers, network.config)(**network.sizes, **IDS)
    config.architectures = [network.config.removesuffix("Config") + "ForCausalLM"]
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    described = str(unfinished / "transformers")
    config.save_pretrained(described)
    transformers.GenerationConfig(**IDS).save_pretrained(described)
    config._name_or_path = described
    base = getattr(builders, network.builder)
    builder = type(base.__name__, (base,), {"load_weights": lambda self, path: random_network(config)})
    types = (CUDA if device == "cuda" else CPU)[precision]
    logging.getLogger("onnxruntime.quantization").setLevel(logging.WARNING)  # it has a line for each node
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        made = builder(config, *(onnx_ir.DataType[kind] for kind in types), device, str(unfinished / "cache"), {})
        made.make_model(described)
        made.save_model(str(unfinished))
        made.make_genai_config(config, {}, str(unfinished))
    if threads:
        settings = files.read_json(unfinished / GENAI_CONFIG)
        settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
        files.write_json(unfinished / GENAI_CONFIG, settings)
    for rest in ("transformers", "cache"):
        shutil.rmtree(unfinished / rest, ignore_errors=True)
    unfinished.rename(folder)


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--networks", type=Path, default=NETWORKS_FILE, metavar="FILE", help="default: networks.yaml")
    parser.add_argument("--network", action="append", default=[], metavar="NAME", help="(repeatable; default: all)")
    parser.add_argument("--precision", action="append", choices=sorted(CUDA),
                        help=f"(repeatable; default: {', '.join(PRECISIONS)})")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="that the model is for (default: cuda)")
    parser.add_argument("--threads", type=cli.count, metavar="N",
                        help="of a model for a CPU (default: left to onnxruntime-genai, which takes half as many as there are)")
    parser.add_argument("--jobs", type=cli.count, default=1, metavar="N", help="models at a time (default: 1)")
    args = parser.parse_args()
    workspace, networks = cli.start(args, begins=True), read_config(args.networks, LanguageNetworks).chosen(args.network)
    if args.threads and args.device != "cpu":
        parser.error("--threads: only of models for a CPU (--device cpu)")
    if wrong := [precision for precision in args.precision or [] if args.device == "cpu" and precision not in CPU]:
        raise UserError(f"--precision {wrong[0]}: the builder has only {' and '.join(CPU)} for a CPU")
    failed = 0
    with process_pool(args.jobs) as pool:
        waiting = {}
        for precision in args.precision or PRECISIONS:
            for name, network in networks.items():
                folder = model_folder(workspace, name, precision)
                if not folder.exists():
                    waiting[folder.name] = pool.submit(build, network, precision, args.device, folder, args.threads)
        for name, future in waiting.items():
            if error := future.exception():
                failed += 1
                log.error("%s: %s: %s", name, type(error).__name__, error)
            else:
                print(f"built {name}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
