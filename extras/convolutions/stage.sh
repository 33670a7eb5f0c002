#!/usr/bin/env bash
# One stage of a profile, as a Slurm job where sbatch is there, else in place. Called by 1_sanity_check.sh, 2_quick_sweep.sh
# and 3_full_run.sh, which name the stage and its time limit.
# Usage: stage.sh --test|--quick|--full HH:MM:SS MODEL ALGORITHM GPU [options of run_profile.py]
# The log becomes a *.out file in the folder of the results. HASE_PYTHON names a Python in place of `python`.
set -euo pipefail
stage=$1 limit=$2 called=$(basename "${HASE_CALLED_AS:-$0}")
shift 2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${HASE_PYTHON:-python}
gpus=" l40s h100 h200 v100 cpu "

usage() {
  echo "usage: $called MODEL ALGORITHM GPU [options of run_profile.py]     for example: $called vgg16 gemm l40s" >&2
  echo "models and algorithms: $python extras/convolutions/run_profile.py --list-models, --list-algorithms; GPUs:$gpus" >&2
  exit 2
}
[ $# -ge 3 ] || usage
model=$1 algorithm=$2
shift 2
[[ $algorithm != -* ]] || usage
while [ $# -gt 0 ] && [[ $1 != -* && $gpus != *" $1 "* ]]; do # an algorithm of several words need not be quoted
  algorithm="$algorithm $1"
  shift
done
[[ $# -gt 0 && $1 != -* ]] || {
  [[ $algorithm == *" "* ]] && what="${algorithm##* }: no such GPU" || what="no GPU named"
  echo "error: $what; known are:$gpus" >&2
  usage
}
gpu=$1
shift

profile=("$python" "$root/extras/convolutions/run_profile.py" --model "$model" --algorithm "$algorithm" --gpu "$gpu" "$stage" "$@")
folder=$("${profile[@]}" --print-folder) # checks the names; the GPU itself is checked where the job runs
mkdir -p "$folder"
name=$(basename "$folder")

if command -v sbatch > /dev/null; then
  place=(--constraint="gpu$gpu" --gres=gpu:1)
  [ "$gpu" != cpu ] || place=()
  cd "$root"
  sbatch --job-name="$name" "${place[@]}" --time="$limit" --output="$folder/%x_%j.out" --wrap "$(printf '%q ' "${profile[@]}")" |
    tee "$folder/submitted.txt" # check_status.sh reads the job's number, the last word
  echo "submitted; see extras/convolutions/check_status.sh. If it stays in the queue: sinfo -C gpu$gpu shows which nodes are free" >&2
else
  log=$folder/${name}_$(date +%Y%m%d_%H%M%S).out
  echo "no sbatch here: running in place; log: $log" >&2
  "${profile[@]}" 2>&1 | tee "$log"
fi
