#!/usr/bin/env bash
# A run on the nodes of a SLURM job: Ray on each of them, the run itself on the first. What follows the script's name goes to
# `understudy run`:
#   sbatch --nodes=2 --gpus-per-node=8 docs/deploy/slurm.sh --config gpu_2x8 run.name=first run.trusted_network=true
# The folder in which sbatch is called is on a file system that all nodes share, and so are the environment of `understudy` and the model.
# A job that is requeued, or sent again, goes on from the run's newest checkpoint.
#SBATCH --job-name=understudy
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
read -r ip _ < <(srun --nodes=1 --ntasks=1 --nodelist="$first" hostname --all-ip-addresses)
address=$ip:6379

RAY_AUTH_TOKEN=$(python3 -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
# At Ray's own 15 engines and ranks get what other programs of a node leave.
export RAY_worker_niceness=0
# Seconds for every node to join; imports from a shared file system are slow.
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
# Starts Ray on each node and the command on the first, and stops all that is Ray's on these nodes when it has ended.
exec srun --ntasks-per-node=1 --cpu-bind=none \
  ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" --disable-usage-stats -- \
  env RAY_ADDRESS="$address" understudy run --resume auto "$@"
