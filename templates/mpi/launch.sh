#!/bin/bash
# Runs once on each node, and starts one mpirun over all of them: `launch.sh WORKERS-PER-NODE PROGRAM…`.
# No node logs in to another one. Where mpirun would call ssh, it calls `launch.sh --agent NODE COMMAND…`,
# which leaves the command in the shared work folder. The node finds it there, and runs it.
set -euo pipefail
folder=$PWD/mpi-start/$CLUSTERCTL_RUN_ID-$CLUSTERCTL_ATTEMPT
mkdir -p "$folder"

if [ "$1" = --agent ]; then
  echo "${*:3}" >"$folder/$2.partial" && mv "$folder/$2.partial" "$folder/$2"
  until [ -s "$folder/$2.code" ]; do sleep 0.2; done
  exit "$(cat "$folder/$2.code")"
fi

if [ "$RANK" != 0 ]; then
  until [ -e "$folder/node$RANK" ] || [ -e "$folder/end" ]; do sleep 0.2; done
  [ ! -e "$folder/end" ] || exit 0
  bash "$folder/node$RANK" && code=0 || code=$?
  echo $code >"$folder/node$RANK.code"
  exit $code
fi

nodes=localhost:$1
for ((node = 1; node < WORLD_SIZE; node++)); do nodes+=,node$node:$1; done
# The network, not the interface: the nodes may name their interfaces differently.
network=$(ip -4 -o address show dev "$GLOO_SOCKET_IFNAME" | awk '{ print $4; exit }')
mpirun --allow-run-as-root --host "$nodes" --mca plm_rsh_agent "bash $PWD/launch.sh --agent" --leave-session-attached \
  --mca oob_tcp_if_include "$network" --mca btl_tcp_if_include "$network" "${@:2}" && code=0 || code=$?
touch "$folder/end"
exit $code
