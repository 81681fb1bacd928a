#!/bin/bash
# setup.sh PACKED_DIR: unpacks what pack.sh made into $KVLOOP_GPU_DIR, makes the model
# folders and the engine's interpreter, and checks that everything can be imported.
# About 20 s; a second run does nothing.
set -euo pipefail
packed=$1
repository=$(cd "$(dirname "$0")/../.." && pwd)
work=${KVLOOP_GPU_DIR:-${TMPDIR:-/tmp}/kvloop-gpu}
[ -e "$work/ready" ] && exit 0
[ -e "$packed/engine.tar.xz" ] || { echo "$packed is not here: name it in carry" >&2; exit 1; }
began=$(date +%s)
mkdir -p "$work/engine" "$work/kvloop" "$work/models"

unpack() {
  python3 -c "import sys, tarfile
tarfile.open(sys.argv[1], 'r:xz').extractall(sys.argv[2], filter='fully_trusted')" "$@"
}
unpack "$packed/engine.tar.xz" "$work/engine" &
unpack "$packed/kvloop.tar.xz" "$work/kvloop"
for kind in q8 q32 a3b v2lite; do python3 "$repository/bench/gpu/models.py" $kind "$work/models/$kind" "$packed"; done
python3 "$repository/bench/gpu/models.py" tiny "$work/models/tiny" "$packed"
wait

# So that vLLM finds kvloop's plugin, as it does where kvloop is installed, and the proof's own.
information=$work/engine/kvloop-0.1.0.dist-info
mkdir -p "$information"
printf 'Metadata-Version: 2.1\nName: kvloop\nVersion: 0.1.0\n' >"$information/METADATA"
cat >"$information/entry_points.txt" <<PLUGINS
[vllm.general_plugins]
kvloop = services.worker.engine_plugin:register
kvloop-renewing = bench.gpu.renewing:register
PLUGINS
# The engine sees vLLM and kvloop's connector, and none of the packages of kvloop.
cat >"$work/engine-python" <<WRAPPER
#!/bin/bash
export PYTHONPATH="\${PYTHONPATH%%:*}:$work/engine"
if [ "\$1" = -m ]; then sleep "\${KVLOOP_GPU_START_DELAY_SECONDS:-0}"; fi
exec python3 "\$@"
WRAPPER
chmod +x "$work/engine-python"
# shellcheck source=/dev/null
. "$repository/bench/gpu/environment.sh"
python3 -c "import services.kvmeta.app, services.router.app, services.worker.app
import kvloop.stack, kvloop.bench.rounds"
PYTHONPATH=$repository "$work/engine-python" -c "import nixl._api, vllm
print('vLLM', vllm.__version__)"
touch "$work/ready"
echo "set up in $(($(date +%s) - began)) s"
