set -u
export WORLD_SIZE={world} LOCAL_WORLD_SIZE={workers} GROUP_WORLD_SIZE={nodes}
export GROUP_RANK=$JOB_COMPLETION_INDEX NODE_RANK=$JOB_COMPLETION_INDEX
pids=
for (( i = 0; i < {workers}; i++ )); do
  (( rank = JOB_COMPLETION_INDEX * {workers} + i ))
  RANK=$rank LOCAL_RANK=$i {command} &
  pids="$pids $!"
done
trap 'kill -TERM $pids 2>/dev/null' TERM
code=0
while [ -n "$pids" ]; do
  left=
  for pid in $pids; do
    if kill -0 $pid 2>/dev/null; then left="$left $pid"; continue; fi
    wait $pid; ended=$?
    if [ $ended -ne 0 ] && [ $code -eq 0 ]; then code=$ended; kill -TERM $pids 2>/dev/null; fi
  done
  pids=$left
  [ -z "$pids" ] || sleep 0.5
done
exit $code