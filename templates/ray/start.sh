#!/bin/bash
# Runs once on each node: starts Ray on all nodes, and then the driver on the first one: `start.sh DRIVER…`.
set -euo pipefail
own=$(python3 -c 'import os, socket
link = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
link.connect((os.environ["MASTER_ADDR"], 9))
print(link.getsockname()[0])')
end=$PWD/ray-end-$CLUSTERCTL_RUN_ID-$CLUSTERCTL_ATTEMPT
common=(--node-ip-address "$own" --disable-usage-stats --block)

if [ "$RANK" = 0 ]; then
  ray start --head --port "$MASTER_PORT" --include-dashboard false "${common[@]}" &
  "$@" && code=0 || code=$?
  touch "$end" && sleep 3 # the other nodes leave first
  kill $! && wait $! || true
  exit $code
fi

answers() { (: <"/dev/tcp/$MASTER_ADDR/$MASTER_PORT") 2>/dev/null; }
until answers; do sleep 0.5; done
ray start --address "$MASTER_ADDR:$MASTER_PORT" "${common[@]}" &
while [ ! -e "$end" ] && answers; do
  kill -0 $! || exit 1 # Ray has ended on this node alone
  sleep 1
done
kill $! && wait $! || true
