#!/usr/bin/env bash
# Networks under OpenVINO, ONNX Runtime and TVM on this CPU: what each takes, and predictions with each family held out, beside a
# second measurement. The last table has the networks that all three ran.
# Usage: recipes/openvino/run.sh [workspace] [options of the exporter, for instance --model resnet18 --image-size 64]
# Needs OpenVINO and TVM: pip install '.[openvino,tvm]'. Takes about two hours on two quiet cores;
# a second run goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/openvino}
hase() { python "$1" --workspace "$out" "${@:2}"; }

mkdir -p "$out"
# TVM's twelve networks and two more, of thirteen families; TVM gets those of 64 x 64, which it runs in time without a search
hase model_zoo/torchvision_exporter.py --config recipes/tvm/model_zoo.yaml --set 'image_sizes=[64, 128, 224]' \
  --set 'models=[resnet18, squeezenet1_1, mobilenet_v2, mobilenet_v3_small, alexnet, googlenet, shufflenet_v2_x1_0, mnasnet1_0,
    vit_b_32, densenet121, efficientnet_b0, regnet_y_400mf, convnext_tiny, vgg11]' "${@:2}" > "$out/exported.txt"
hase ort_analysis/fusion_detector.py --device cpu --runtime openvino
hase ort_analysis/fusion_detector.py --device cpu > "$out/analysed.txt"
hase kernel_model/kernel_builder.py > "$out/kernels.txt"
small=()
for model in "$out"/model_zoo/models/*_64x64.onnx; do small+=(--model "$model"); done
hase runtimes/tvm/relax_parser.py "${small[@]}"
hase benchmark/collector.py --config recipes/openvino/cpu.yaml
hase benchmark/collector.py --config recipes/openvino/cpu.yaml --set runtime=ort
hase benchmark/collector.py --config recipes/tvm/cpu.yaml
hase training/train_kernel_model.py
hase training/fit_composition.py
hase benchmark/dataset.py --repeat 200 --config recipes/openvino/cpu.yaml
hase inference/sum_and_path.py
