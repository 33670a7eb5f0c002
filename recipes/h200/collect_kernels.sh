#!/usr/bin/env bash
# Kernels of no model on this machine's GPU, label `gpu`, or on its CPU: draws and builds them, then measures. Started again, it
# goes on. Usage: recipes/h200/collect_kernels.sh language|forms|rare|standard|host [workspace] [kernels] [minutes]
#   recipes/h200/collect_kernels.sh language out/llm 5000 8    # draws 5,000 kernels and measures for eight minutes
#   recipes/h200/collect_kernels.sh forms out/forms 20000      # rare forms of any operator
#   recipes/h200/collect_kernels.sh rare out/rare 14000        # layers of networks at rare sizes
#   recipes/h200/collect_kernels.sh standard out/standard 6000 # ONNX's own attention, quantised networks, bfloat16
#   recipes/h200/collect_kernels.sh host out/host 3000         # what the CPU runs in CUDA sessions, since CUDA lacks it
# Further arguments are the collector's: --set 'tracers=6' --set 'block_kernels=60'.
# Takes eight minutes for 6,800 kernels of language models on an H200 with 16 cores and --set tracers=8. The dataset is
# <workspace>/benchmark/dataset/<target>; recipes/llm/compare_algorithms.py compares the CUDA kernels that ran.
set -euo pipefail
cd "$(dirname "$0")/../.."
kind=${1:?usage: recipes/h200/collect_kernels.sh language|forms|rare|standard|host [workspace] [kernels] [minutes]}
out=${2:-out/$kind}
count=${3:-5000}
minutes=${4:-}
shift $(($# < 4 ? $# : 4))
config=collect_kernels.yaml
case $kind in
  language | standard) sizes=(--batch-sizes 1,2,4,8,16,32,64 --most-gflop 4000 --most-mib 2048) ;;
  forms) sizes=(--batch-sizes 1,1,1,2,4,8,16,32 --most-gflop 100 --most-mib 512) ;;
  rare) sizes=(--batch-sizes 1,1,2,4,8,16,16,32,64,128 --most-gflop 1000 --most-mib 1024) ;;
  host) sizes=(--batch-sizes 1,1,1,2,4,8,16 --most-gflop 3 --most-mib 64) config=collect_host_kernels.yaml ;;
  *) echo "$kind: no such kind; use language, forms, rare, standard or host" >&2; exit 2 ;;
esac
mkdir -p "$out"
jobs=$(nproc)

# one process for each core: more threads would only wait for cores
OMP_NUM_THREADS=1 python kernel_model/kernel_sampler.py --workspace "$out" --count 0 --free "$count" --free-kind "$kind" \
  "${sizes[@]}" --jobs "$jobs" --json > "$out/sampled.json"
python benchmark/collector.py --workspace "$out" --config "recipes/h200/$config" ${minutes:+--minutes "$minutes"} \
  --json "$@"
