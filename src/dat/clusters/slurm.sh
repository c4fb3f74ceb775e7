#!/bin/bash
@DIRECTIVES@

# One torchrun a node. Before its time is up, or when it is preempted, this shell is told (SIGTERM),
# has the workers save a checkpoint, and puts the job back into the queue; then it goes on from
# there. `sbatch` this file again to go on with a run that was cancelled.

set -uo pipefail
run=@OUT@
train=(@TRAIN@)
@VARIABLES@

if [[ -f $run/result.json ]]; then
    echo "$run is complete"
    exit 0
fi
for checkpoint in "$run"/checkpoints/[0-9]*; do
    [[ -d $checkpoint ]] && train=(train --resume "$run")
done
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

told=no
stop() {
    # if it is SLURM that ends the job, all have been told already and it requeues by itself
    state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
    if [[ $told == no && $state == RUNNING ]]; then
        told=yes
        # to torchrun on every node, not to srun, which would kill what it started
        scancel --signal=TERM --state=RUNNING "$SLURM_JOB_ID"
    fi
}
trap stop TERM

srun --kill-on-bad-exit=0 --wait=60 --ntasks-per-node=1 @TORCHRUN@ \
    --rdzv-backend c10d --rdzv-endpoint "$host:@PORT@" --rdzv-id "$SLURM_JOB_ID" \
    -m dat "${train[@]}" &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2> /dev/null; do # a signal ends the wait before its time
    wait "$step"
    code=$?
done

if [[ -f $run/result.json ]]; then
    exit 0
fi
if [[ $told == yes ]]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "go on with: sbatch this file again"
fi
exit "$code"
