#!/usr/bin/env bash
# Language models on this machine's CPU: builds them, measures them with onnxruntime-genai, then their kernels, then the models again,
# and shows how far predictions from these kernels are off. What genai's loop takes there is learned from small decoders beforehand.
# Started again, it goes on.
# Usage: recipes/llm/on_cpu.sh [workspace] [networks.yaml] [small networks.yaml] [options of judge.py...]
#   recipes/llm/on_cpu.sh out/llm-cpu                         # the models of cpu.yaml and loop.yaml; 25 minutes on two cores
#   recipes/llm/on_cpu.sh out/llm-cpu recipes/llm/cpu.yaml recipes/llm/loop.yaml --json
# Needs pip install '.[llm]'. The machine should do nothing else meanwhile.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/llm-cpu}
networks=${2:-recipes/llm/cpu.yaml}
small=${3:-recipes/llm/loop.yaml}
shift $(($# < 3 ? $# : 3))
loops=$out/loop # a workspace of its own, within

build() { # workspace networks precision...
  python recipes/llm/make_models.py --workspace "$1" --networks "$2" --device cpu "${@:3}" --threads "$(nproc)" >&2
}
measured() { # workspace networks model: with onnxruntime-genai, and its kernels
  python recipes/llm/measure_genai.py --workspace "$1" --networks "$2" --model "$3" >&2
  python recipes/llm/judge.py --workspace "$1" --measure-missing --model "$3" > "$1/$3.txt"
}

build "$loops" "$small" --precision int4
for model in "$loops"/llm/models/*; do
  measured "$loops" "$small" "$(basename "$model")"
done

build "$out" "$networks" --precision int4 --precision fp32
mkdir -p "$out/again/llm"
ln -sfn ../../llm/models "$out/again/llm/models"
for model in "$out"/llm/models/*; do # one after another, so that little time lies between a model, its kernels, and the model again
  name=$(basename "$model")
  measured "$out" "$networks" "$name"
  python recipes/llm/measure_genai.py --workspace "$out/again" --networks "$networks" --model "$name" >&2
done
python recipes/llm/fit_loop.py --workspace "$out" --loops "$loops" >&2
python recipes/llm/judge.py --workspace "$out" --measure-missing --again "$out/again" "$@"
