
set -u
if ! command -v {program} >/dev/null; then
  echo "error: $(hostname) has no "{program}", which made this script"
  echo "hint: install clusterctl in a folder that all nodes of the partition share, and export the script again from there"
  exit 127
fi
cd {folder} || exit 2
limit=
trap 'kill -TERM "$up"' TERM                # scancel: the run ends as by Ctrl-C, with exit code 103
trap 'limit=106; kill -TERM "$up"' USR1     # the time limit is near
{up} &
up=$!
until wait "$up"; code=$?; ! kill -0 "$up" 2>/dev/null; do :; done
wait "$up"; code=$?
if [ -n "$limit" ] && [ "$code" -ne 0 ]; then code=$limit; fi
exit "$code"
