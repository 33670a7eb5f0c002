#!/usr/bin/env bash
# Stage 2: ten input sizes, to see that times grow as they should. Results: extras/convolutions/results/2_quick/
# Usage: extras/convolutions/2_quick_sweep.sh MODEL ALGORITHM GPU [options of run_profile.py]     for example: 2_quick_sweep.sh vgg16 gemm l40s
HASE_CALLED_AS=2_quick_sweep.sh exec bash "$(dirname "${BASH_SOURCE[0]}")/stage.sh" --quick 01:00:00 "$@"
