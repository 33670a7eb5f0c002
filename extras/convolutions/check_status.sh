#!/usr/bin/env bash
# What has been profiled so far, of all stages, with runs that wait, were refused or were killed; and Slurm's queue, if it is there.
# Usage: extras/convolutions/check_status.sh [options of run_profile.py --status, for instance --json]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
"${HASE_PYTHON:-python}" "$root/extras/convolutions/run_profile.py" --status "$@"
if command -v squeue > /dev/null; then
  squeue --user "$(id -un)" >&2
  echo "jobs that wait (PD): sinfo -C gpul40s (or gpuh100 …) shows which nodes are free" >&2
fi
