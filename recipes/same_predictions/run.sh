#!/usr/bin/env bash
# Makes new inputs for the recorded questions: models and their records, a small dataset of this machine's CPU, and predictors
# trained on it. Then records the answers. Rarely needed: after an intended change, `record.py` alone records new answers.
# Usage: recipes/same_predictions/run.sh [workspace]     Takes five minutes on two cores, after the install of requirements.txt.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-out/same_predictions}
here=recipes/same_predictions
hase() { python "$1" --workspace "$out/cpu" "${@:2}"; }

mkdir -p "$out/cpu" "$out/models/model_zoo"
hase model_zoo/torchvision_exporter.py --device cpu --no-dynamic --set 'image_sizes=[64]' --set 'batch_sizes=[1, 4]' \
  --set 'models=[resnet18, squeezenet1_1, mobilenet_v3_small, shufflenet_v2_x0_5, mnasnet0_5]'
hase ort_analysis/fusion_detector.py --device cpu
hase kernel_model/kernel_builder.py
# as in the demo, with few samples: how good they are does not matter here
hase benchmark/collector.py --config recipes/demo/collector.yaml --set device=cpu --set stress.settle_s=0.3 \
  --set 'kernel={warmup: 1, warmup_s: 0.005, budget_s: 0.005, least_runs: 3, most_runs: 4}' \
  --set 'model={warmup: 1, warmup_s: 0.02, budget_s: 0.1, least_runs: 4, most_runs: 8}' \
  --set attempts=1 --set patience_s=0 --set block_kernels=64
hase training/train_kernel_model.py --config $here/training.yaml
hase training/fit_composition.py

python model_zoo/torchvision_exporter.py --workspace "$out/models" --device cpu --set 'models=[resnet18, mobilenet_v3_small]' \
  --set 'image_sizes=[224]' --set 'batch_sizes=[1]' --set dynamic=batch --set fixed=false
only=$(python $here/record.py --list-models)
# shellcheck disable=SC2086 - several names
python recipes/kinds/make_models.py --out "$out/models/model_zoo/models" --only $only
python $here/record.py --models "$out/models/model_zoo/models" --cpu "$out/cpu"
