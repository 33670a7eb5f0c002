#!/usr/bin/env bash
# The demo beside a neighbour that comes and goes at random: benchmark/stressor.py, on for 10 to 60 s at an intensity of 0.3 to
# 0.9, off for 20 to 120 s. The error that it ends with is in docs/accuracy.md.
# Usage: recipes/demo/disturbed.sh [workspace] [seed]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/demo_disturbed}
RANDOM=${2:-1}
mkdir -p "$out"
kinds=(compute memory mixed)

come_and_go() {
  trap 'kill $(jobs -p) 2> /dev/null || true; exit 0' TERM
  while true; do
    sleep $((20 + RANDOM % 101)) & wait $!
    python benchmark/stressor.py --quiet --device cpu --kind "${kinds[RANDOM % 3]}" --intensity "0.$((3 + RANDOM % 7))" \
      --duration $((10 + RANDOM % 51)) & wait $! || true
  done
}

come_and_go >> "$out/neighbour.txt" 2>&1 &
neighbour=$!
trap 'kill $neighbour 2> /dev/null || true' EXIT
bash recipes/demo/run.sh "$out"
