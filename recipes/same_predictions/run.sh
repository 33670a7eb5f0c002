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
hase model_zoo/torchvision_exporter.py --config $here/model_zoo.yaml
hase ort_analysis/fusion_detector.py --device cpu
hase kernel_model/kernel_builder.py
hase benchmark/collector.py --config $here/collector.yaml
hase training/train_kernel_model.py --config $here/training.yaml
hase training/fit_composition.py

python model_zoo/torchvision_exporter.py --workspace "$out/models" --config $here/open_sizes.yaml
only=$(python $here/record.py --list-models)
# shellcheck disable=SC2086 - several names
python recipes/kinds/make_models.py --out "$out/models/model_zoo/models" --only $only
python $here/record.py --models "$out/models/model_zoo/models" --cpu "$out/cpu"
