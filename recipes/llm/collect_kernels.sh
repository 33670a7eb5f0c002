#!/usr/bin/env bash
# Kernels of language models on this machine's GPU, label `gpu`: draws and builds them, then measures. Started again, it goes on.
# Usage: recipes/llm/collect_kernels.sh [workspace] [kernels] [minutes]
#   recipes/llm/collect_kernels.sh out/llm 5000 8    # draws 5,000 kernels and measures for eight minutes; again for the next ones
# Further arguments are the collector's: --set 'tracers=6' --set 'block_kernels=60'.
# Takes eight minutes for 6,800 kernels on an H200 with 16 cores and --set tracers=8. The dataset is
# <workspace>/benchmark/dataset/<target>; recipes/llm/compare_algorithms.py compares the CUDA kernels that ran.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/llm}
count=${2:-5000}
minutes=${3:-}
shift $(($# < 3 ? $# : 3))
mkdir -p "$out"
jobs=$(nproc)

# one process for each core: more threads would only wait for cores
OMP_NUM_THREADS=1 python kernel_model/kernel_sampler.py --workspace "$out" --count 0 --free "$count" --free-kind language \
  --batch-sizes 1,2,4,8,16,32,64 --most-gflop 4000 --most-mib 2048 --jobs "$jobs" --json > "$out/sampled.json"
python benchmark/collector.py --workspace "$out" --config recipes/llm/collect.yaml ${minutes:+--minutes "$minutes"} --json "$@"
