#!/usr/bin/env bash
# Language models on this machine's CPU: builds them, measures them with onnxruntime-genai, then their kernels, then the models again,
# and shows how far predictions from these kernels are off. Started again, it goes on.
# Usage: recipes/llm/on_cpu.sh [workspace] [networks.yaml] [options of judge.py...]
#   recipes/llm/on_cpu.sh out/llm-cpu                         # the models of cpu.yaml; a quarter of an hour on two cores
#   recipes/llm/on_cpu.sh out/llm-cpu recipes/llm/cpu.yaml --json
# Needs requirements-pool.txt and requirements-llm.txt. The machine should do nothing else meanwhile.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/llm-cpu}
networks=${2:-recipes/llm/cpu.yaml}
shift $(($# < 2 ? $# : 2))

python recipes/llm/make_models.py --workspace "$out" --networks "$networks" --device cpu --precision int4 --precision fp32 \
  --threads "$(nproc)" >&2
mkdir -p "$out/again/llm"
ln -sfn ../../llm/models "$out/again/llm/models"
for model in "$out"/llm/models/*; do # one after another, so that little time lies between a model, its kernels, and the model again
  name=$(basename "$model")
  python recipes/llm/measure_genai.py --workspace "$out" --networks "$networks" --model "$name" >&2
  python recipes/llm/judge.py --workspace "$out" --measure-missing --model "$name" > "$out/$name.txt"
  python recipes/llm/measure_genai.py --workspace "$out/again" --networks "$networks" --model "$name" >&2
done
python recipes/llm/judge.py --workspace "$out" --measure-missing --again "$out/again" "$@"
