#!/bin/sh
# What mpirun, srun, torchrun or SkyPilot starts once on each machine: rank 0 is the program, the others are its hosts.
#
#   SHARED=/nfs/run-7 mpirun -n 5 --map-by node examples/jobs/start.sh train.py
#   SHARED=/nfs/run-7 torchrun --nnodes=5 --nproc-per-node=1 ... --no-python examples/jobs/start.sh train.py
#
# SHARED is a folder that all machines mount, and that is empty when the run begins.
set -eu
: "${SHARED:?names a folder that all machines mount, empty when the run begins}"
RANK=${RANK:-${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${PMI_RANK:-${SLURM_PROCID:-${SKYPILOT_NODE_RANK:-}}}}}}
: "${RANK:?is not set: start this by mpirun, srun, torchrun or SkyPilot}"
if [ "$RANK" = 0 ]; then
    exec python "$@"
fi
until [ -s "$SHARED/door" ]; do
    sleep 0.2
done
exec trimesh host join "$(cat "$SHARED/door")" --token-file "$SHARED/tokens" --line "$RANK"
