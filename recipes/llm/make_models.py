"""Builds language models with random weights, in the form in which people deploy them, with onnxruntime-genai's builder.

Reads networks.yaml. Writes a folder for each network and precision: `<workspace>/llm/models/<network>-<precision>`. Existing
folders are kept. Downloads nothing. Needs onnxruntime-genai (pip install '.[llm]'), of which only the builder's Python files
are used here.
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

from hase.inference.llm.language_model import GENAI_CONFIG
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
WEIGHT_STD = 0.02  # standard deviation of the weights, as in transformers before training
DRAWN_NUMBERS = 1 << 22  # random numbers; larger weights repeat them, since drawing billions takes minutes
TOKEN_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
TYPES = {  # by device and precision, the types of inputs and outputs, and of weights
    "cuda": {"fp16": ("FLOAT16", "FLOAT16"), "bf16": ("BFLOAT16", "BFLOAT16"), "int4": ("FLOAT16", "INT4"),
             "fp32": ("FLOAT", "FLOAT")},
    "cpu": {"int4": ("FLOAT", "INT4"), "fp32": ("FLOAT", "FLOAT")}}
log = get_logger("llm")


def random_network(config: Any) -> Any:
    """The network of a transformers config, with random weights in half precision."""
    torch.manual_seed(0)
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    network.to_empty(device="cpu")
    numbers = (torch.randn(DRAWN_NUMBERS) * WEIGHT_STD).half()
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
            else:
                for part in parameter.data.view(-1).split(DRAWN_NUMBERS):
                    part.copy_(numbers[:part.numel()])
    network.tie_weights()
    return network.eval()


def build(network: LanguageNetwork, precision: str, device: str, folder: Path, threads: int | None = None) -> None:
    """Builds one model into a folder. Raises UserError if onnxruntime-genai is not installed."""
    spec = importlib.util.find_spec("onnxruntime_genai")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the builder of onnxruntime-genai is not installed; pip install '.[llm]'")
    sys.path.insert(0, str(Path(spec.submodule_search_locations[0]) / "models"))
    builders = importlib.import_module("builders")
    config = getattr(transformers, network.config)(**network.sizes, **TOKEN_IDS)
    config.architectures = [network.config.removesuffix("Config") + "ForCausalLM"]
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    config_folder = str(unfinished / "transformers")
    config.save_pretrained(config_folder)
    transformers.GenerationConfig(**TOKEN_IDS).save_pretrained(config_folder)
    config._name_or_path = config_folder
    base = getattr(builders, network.builder)
    builder_class = type(base.__name__, (base,), {"load_weights": lambda self, path: random_network(config)})
    types = (onnx_ir.DataType[name] for name in TYPES[device][precision])
    logging.getLogger("onnxruntime.quantization").setLevel(logging.WARNING)  # it has a line for each node
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        builder = builder_class(config, *types, device, str(unfinished / "cache"), {})
        builder.make_model(config_folder)
        builder.save_model(str(unfinished))
        builder.make_genai_config(config, {}, str(unfinished))
    if threads:
        settings = files.read_json(unfinished / GENAI_CONFIG)
        settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
        files.write_json(unfinished / GENAI_CONFIG, settings)
    for folder_name in ("transformers", "cache"):
        shutil.rmtree(unfinished / folder_name, ignore_errors=True)
    unfinished.rename(folder)


def main() -> int:
    parser = cli.parser(__doc__, EXAMPLES)
    parser.add_argument("--networks", type=Path, default=NETWORKS_FILE, metavar="FILE", help="default: networks.yaml")
    parser.add_argument("--network", action="append", default=[], metavar="NAME",
                        help="a network to build (repeatable; default: all)")
    parser.add_argument("--precision", action="append", choices=sorted(TYPES["cuda"]),
                        help=f"of the weights (repeatable; default: {', '.join(PRECISIONS)}; for a CPU int4)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device of the models (default: cuda)")
    parser.add_argument("--threads", type=cli.count, metavar="N",
                        help="of a model for a CPU (default: left to onnxruntime-genai, which takes half as many as there are)")
    parser.add_argument("--jobs", type=cli.count, default=1, metavar="N", help="models at a time (default: 1)")
    args = parser.parse_args()
    workspace, networks = cli.start(args, begins=True), read_config(args.networks, LanguageNetworks).chosen(args.network)
    if args.threads and args.device != "cpu":
        parser.error("--threads: only of models for a CPU (--device cpu)")
    if unknown := [precision for precision in args.precision or [] if precision not in TYPES[args.device]]:
        raise UserError(f"--precision {unknown[0]}: the builder has only {' and '.join(TYPES[args.device])} for a CPU")
    precisions = args.precision or [precision for precision in PRECISIONS if precision in TYPES[args.device]]
    failed = 0
    with process_pool(args.jobs) as pool:
        futures = {}
        for precision in precisions:
            for name, network in networks.items():
                folder = model_folder(workspace, name, precision)
                if not folder.exists():
                    futures[folder.name] = pool.submit(build, network, precision, args.device, folder, args.threads)
        for name, future in futures.items():
            if error := future.exception():
                failed += 1
                log.error("%s: %s: %s", name, type(error).__name__, error)
            else:
                print(f"built {name}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
