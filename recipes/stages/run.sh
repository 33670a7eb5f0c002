#!/usr/bin/env bash
# Plans of the stages of a graph network on this machine's CPU and NVIDIA GPU, predicted and run, with 1, 4 and 16 threads of the
# CPU. Started again, it goes on.
# Usage: recipes/stages/run.sh [workspace [threads … ]]     About 15 minutes on an H200 for 1, 4 and 16 threads.
# Each number of threads has a workspace of its own, <workspace>/threads_<n>, with results in extras/graph_stages/results.
# Environment: UNITS (default CPU,CUDA) and CASES (default extras/graph_stages/test_cases.json) for a smaller try.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/stages}
[ $# -le 1 ] && set -- "$out" 1 4 16
shift
units=${UNITS:-CPU,CUDA} cases=${CASES:-extras/graph_stages/test_cases.json}

for threads in "$@"; do
  folder=$out/threads_$threads
  profiling=$folder/graph_stages
  mkdir -p "$profiling"
  if [ ! -e "$profiling/exported_models" ] && [ -e "$out/threads_$1/graph_stages/exported_models" ]; then
    cp -r "$out/threads_$1/graph_stages/exported_models" "$profiling/"
  fi
  # PyTorch on the CPU: all stages share its threads. ONNX Runtime would have threads of its own for each stage.
  python extras/graph_stages/profile_stages.py --workspace "$folder" --all --units "$units" --cpu-runtime torch --threads "$threads" \
    --cases "$cases" > "$folder/stages.tsv"
  python extras/graph_stages/plan_stages.py --workspace "$folder" --left-out | tee "$folder/left_out.tsv"
  python extras/graph_stages/plan_stages.py --workspace "$folder" --time-chains --run --warmup 2 --runs 5 --rounds 5 | tee "$folder/plans.tsv"
  python extras/graph_stages/plan_stages.py --workspace "$folder" --run --alone --json > "$folder/plans_alone.json"
  python extras/graph_stages/plan_stages.py --workspace "$folder" --out "$folder/plan_table.json" > "$folder/plan_table.tsv"
done
