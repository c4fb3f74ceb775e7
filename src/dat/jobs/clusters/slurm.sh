#!/bin/bash
@DIRECTIVES@

# One torchrun per node. Before the time limit this shell receives SIGTERM and forwards it to the
# workers, which save a checkpoint and exit. A job that has made progress is requeued and resumes from
# there; one that has not would only fail again. To resume a cancelled run, `sbatch` this file again.
@SETUP@
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
is_running() { # neither cancelled nor requeued by SLURM itself
    [[ $(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T) == RUNNING ]]
}
begun=$(last_checkpoint)
[[ $begun == none ]] || train=(train --resume "$run"@CODE@)
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

signalled=no
stop() {
    # if SLURM itself ends the job, all have received the signal already
    if [[ $signalled == no ]] && is_running; then
        signalled=yes
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
while kill -0 "$step" 2> /dev/null; do # a signal ends `wait` early
    wait "$step"
    code=$?
done

if [[ -f $run/result.json ]]; then
    exit 0
fi
if is_running && [[ $signalled == yes || $(last_checkpoint) != "$begun" ]]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "to resume, sbatch this file again"
fi
exit "$code"
