#!/usr/bin/env bash
# Stage 3: a hundred input sizes, the whole data of a combination. Results: extras/convolutions/results/3_full/
# Usage: extras/convolutions/3_full_run.sh MODEL ALGORITHM GPU [options of run_profile.py]     for example: 3_full_run.sh vgg16 gemm l40s
HASE_CALLED_AS=3_full_run.sh exec bash "$(dirname "${BASH_SOURCE[0]}")/stage.sh" --full 06:00:00 "$@"
