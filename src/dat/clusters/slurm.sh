#!/bin/bash
@DIRECTIVES@

# One torchrun a node. Before its time is up this shell is told (SIGTERM) and tells the workers, who
# save a checkpoint and leave. A job that has come further is put back into the queue and goes on from
# there; one that has not would only fail again. `sbatch` this file again to go on with a run that
# was cancelled.

set -uo pipefail
run=@OUT@
train=(@TRAIN@)
@VARIABLES@

if [[ -f $run/result.json ]]; then
    echo "$run is complete"
    exit 0
fi
last_checkpoint() {
    local checkpoint last=none
    for checkpoint in "$run"/checkpoints/[0-9]*; do
        [[ -d $checkpoint ]] && last=$checkpoint
    done
    echo "$last"
}
is_running() { # not being cancelled, nor requeued by SLURM itself
    [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]]
}
begun=$(last_checkpoint)
[[ $begun == none ]] || train=(train --resume "$run")
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

told=no
stop() {
    # if it is SLURM that ends the job, all have been told already
    if [[ $told == no ]] && is_running; then
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
if is_running && [[ $told == yes || $(last_checkpoint) != "$begun" ]]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "go on with: sbatch this file again"
fi
exit "$code"
