# Sourced: the environment of kvloop's processes on a GPU machine that setup.sh prepared.
KVLOOP_GPU_DIR=${KVLOOP_GPU_DIR:-${TMPDIR:-/tmp}/kvloop-gpu}
_repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
# The checkout may be a fresh copy since setup.sh ran: git ignores the generated code.
cp -r "$KVLOOP_GPU_DIR/kvloop/generated/." "$_repository/"
# The repository comes first: engine-python passes on the first entry alone.
export PYTHONPATH=$_repository:$KVLOOP_GPU_DIR/kvloop/site:$KVLOOP_GPU_DIR/engine
export KVLOOP_GPU_DIR PYTHONUNBUFFERED=1
