#!/usr/bin/env bash
# A dataset on several nodes of a Slurm cluster: sbatch recipes/cluster/slurm.sh [workspace]
# The workspace holds models and built kernels, on a disk that the first node sees. Submit an ended job again: it goes on.
# Nodes are taken whole, since what else runs there would disturb what is measured. (A template: never run under Slurm.)
#SBATCH --job-name=hase
#SBATCH --nodes=4
#SBATCH --exclusive
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "$0")/../..}"
out=${1:-out/h200}
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
address="${nodes[0]}:6379"
node_options=(--object-store-memory=200000000 --block)

srun --nodes=1 --ntasks=1 -w "${nodes[0]}" ray start --head --port=6379 --include-dashboard=false "${node_options[@]}" &
sleep 20  # until it listens
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 -w "$node" ray start --address="$address" "${node_options[@]}" &
done
sleep 20
srun --overlap --nodes=1 --ntasks=1 -w "${nodes[0]}" python benchmark/collector.py --ray "$address" \
    --config recipes/h200/collector.yaml --workspace "$out"
