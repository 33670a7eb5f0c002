#!/usr/bin/env bash
# The full table of convolution algorithms on this machine's GPU, and what is learned from it. Started again, it goes on.
# Usage: recipes/convolutions/run.sh [workspace [minutes]]     About 16 minutes on an H200, of which two without the GPU.
# The dataset becomes <workspace>/convolutions.tar.xz (tables) and convolutions-samples.tar.xz (every sample), a page of all runs
# measured.md; the tables of choices and the plots go to <workspace>/choice/.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/convolutions}
minutes=${2:-60}
hase() { python "$1" --workspace "$out" "${@:2}"; }

mkdir -p "$out"
hase extras/convolutions/run_profile.py --check-cuda
hase recipes/convolutions/measure_table.py --sizes 224 --batch 16 --energy-seconds 0 --minutes "$minutes" | tee "$out/table_b16.tsv"
hase recipes/convolutions/measure_table.py --minutes "$minutes" | tee "$out/table_b1.tsv"
hase recipes/convolutions/publish_table.py pack
hase recipes/convolutions/publish_table.py page --markdown "$out/measured.md"
hase extras/convolutions/choose_algorithms.py --output-dir "$out/choice"
