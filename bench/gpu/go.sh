#!/bin/bash
# go.sh OUT BUDGET_SECONDS PART...: sets up if need be, and runs parts of the proof.
# Parts are listed by `python3 -m bench.gpu.run --help`. What pack.sh made lies in .gpu.
set -euo pipefail
out=$1 budget=$2
shift 2
cd "$(dirname "$0")/../.."
bash bench/gpu/setup.sh .gpu
# shellcheck source=/dev/null
. bench/gpu/environment.sh
uname -sr # gVisor says 4.4.0: its system calls cost several times as much
nvidia-smi --query-gpu=name,driver_version,memory.used,memory.total --format=csv,noheader || true
# What a hop between two processes costs here. It ends while the engines still load.
timeout 80 python3 -m bench.path 8192 >"$out/path-$1.txt" 2>&1 &
path=$!
status=0
python3 -m bench.gpu.run "$@" --out "$out" --runs "$KVLOOP_GPU_DIR/runs-$1" --budget "$budget" \
  >"$out/log-$1.txt" 2>&1 || status=$?
wait "$path" || true
tail -n 8 "$out/path-$1.txt"
tail -c 10000 "$out/log-$1.txt"
nvidia-smi --query-gpu=memory.used --format=csv,noheader || true
exit "$status"
