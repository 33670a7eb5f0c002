#!/usr/bin/env bash
# Stage 1: one input size, to see that a model runs under an algorithm. Results: extras/convolutions/results/1_sanity/
# Usage: extras/convolutions/1_sanity_check.sh MODEL ALGORITHM GPU [options of run_profile.py]     for example: 1_sanity_check.sh vgg16 gemm l40s
HASE_CALLED_AS=1_sanity_check.sh exec bash "$(dirname "${BASH_SOURCE[0]}")/stage.sh" --test 00:15:00 "$@"
