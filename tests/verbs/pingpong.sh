#!/usr/bin/env bash
# The least that must work on the emulated machine: bytes by RDMA verbs, reliable connection, both ends here.
set -euo pipefail
log=$(mktemp)
trap 'rm -f "$log"' EXIT
ibv_rc_pingpong --gid-idx=1 --iters=200 >"$log" &
until ss --listening --numeric --tcp | grep -q ':18515 '; do sleep 0.05; done
ibv_rc_pingpong --gid-idx=1 --iters=200 localhost
wait %1
