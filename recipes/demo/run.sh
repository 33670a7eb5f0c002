#!/usr/bin/env bash
# The whole pipeline at a small size: every phase as you would type it, into a workspace of its own.
# Usage: recipes/demo/run.sh [workspace]     A second run reuses what is done.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/demo}
began=$SECONDS
phase() { printf '\n== %s (after %d s)\n' "$1" $((SECONDS - began)) >&2; }
hase() { python "$1" --workspace "$out" "${@:2}"; }

mkdir -p "$out"
phase "1  torchvision models to ONNX"
hase model_zoo/torchvision_exporter.py --config recipes/demo/model_zoo.yaml > "$out/exported.txt"
models=("$out"/model_zoo/models/*x[0-9]*[0-9].onnx)  # those of one size, which the demo is about
phase "2  what ONNX Runtime makes of them: kernels"
hase ort_analysis/fusion_detector.py "${models[@]/#/--model=}" | cut -c -150
phase "3  every kernel, and a thousand further shapes, as ONNX models of their own"
hase kernel_model/kernel_builder.py > "$out/kernels.txt"
hase kernel_model/kernel_sampler.py --count 1000 --batch-sizes 1,2,4,8,16 --most-gflop 1 --without mnasnet
phase "4  measure kernels and models, idle and under load"
hase benchmark/collector.py --config recipes/demo/collector.yaml
phase "5  learn kernels' times, and how they add up"
hase training/train_kernel_model.py
hase training/fit_composition.py
phase "6  the models as graphs"
hase graph_model/dag_critical_path.py > "$out/dags.txt"
phase "7  predict, and compare with real runs; mnasnet1_0 was in no fit"
hase inference/predict_model_latency.py --model mnasnet1_0_fp32_b8_224x224.onnx
if [ "$out/evaluation.txt" -nt "$(ls "$out"/training/predictors/*/composition.json)" ] && [ -e "$out/report.html" ]; then
    cat "$out/evaluation.txt"  # measured in an earlier run, and nothing changed since
else
    hase evaluator.py --patience-s 60 --html "$out/report.html" "${models[@]}" | tee "$out/evaluation.new"
    mv "$out/evaluation.new" "$out/evaluation.txt"
fi
phase "8  a model with open sizes, for questions of your own"
hase model_zoo/torchvision_exporter.py --config recipes/demo/model_zoo.yaml --model mnasnet1_0 --batch-size 1 \
  --set dynamic=true --set fixed=false >> "$out/exported.txt"
phase "done"
echo "The comparison as a page to look at: $out/report.html" >&2
