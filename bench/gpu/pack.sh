#!/bin/bash
# pack.sh PAYLOAD_DIR [OUT_DIR]: makes what travels to a GPU machine without a network.
#
#   OUT_DIR/engine.tar.xz   vLLM for CUDA with all that it needs (from PAYLOAD_DIR)
#   OUT_DIR/kvloop.tar.xz   site/: kvloop's pinned packages for CPython 3.12, less
#                           those of the engine; generated/: the protobuf code,
#                           which git ignores
#   OUT_DIR/tokenizer*.json
#
# Together with the repository they fit into one transfer of 64 MiB. engine.tar.xz is
# kept if it is there: compressing it takes four minutes. PYTHON: an interpreter with
# pip and kvloop's build requirements. OUT_DIR is .gpu by default.
set -euo pipefail
payload=$1 out=$(realpath -m "${2:-.gpu}")
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

engine=$work/engine
mkdir "$engine"
tar -xJf "$payload/payload.tar.xz" -C "$engine"
cp -r "$payload"/extra/. "$engine/"
# What NixlConnector never loads: transfers to object stores, and UCX's own benchmark.
libs=$engine/nixl_cu13.libs
rm -f "$libs"/nixl/libplugin_{AZURE_BLOB,OBJ,GPUNETIO,GUSLI,INFINIA,GDS,GDS_MT}.so
rm -f "$libs"/libaws-* "$libs"/libazure-* "$libs"/ucx/libucx_perftest_*
if [ ! -e "$out/engine.tar.xz" ]; then
  # A larger dictionary than xz takes by default: 10 MiB less.
  tar -C "$engine" --sort=name -cf - . | xz -9 >"$work/engine.tar.xz"
  mv "$work/engine.tar.xz" "$out/"
fi
cp "$payload"/tokenizer*.json "$out/"

# Left out: what the engine brings in the same version, PostgreSQL's driver (the
# benchmark's ledger is SQLite), and two packages that the machine's own Python has.
wanted=$work/requirements.txt
grep -vE '^ *(#|asyncpg|uvloop|pygments|$)' requirements/kvloop.txt | while read -r pin; do
  name=${pin%%==*}
  [ -e "$engine/${name//-/_}-${pin##*==}.dist-info" ] || echo "$pin"
done >"$wanted"
site=$work/kvloop/site
platforms=()
for glibc in 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
"$python" -m pip install --quiet --no-deps --no-compile --only-binary=:all: \
  --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" \
  --target "$site" -r "$wanted"
rm -rf "$site/bin" "$site/sqlalchemy/testing" "$site"/*/tests
# Or a package `google` of the machine's own Python would hide this one's protobuf.
touch "$site/google/__init__.py"
find "$site" -name '*.so*' -type f -exec strip --strip-unneeded {} + 2>/dev/null || true
"$python" hatch_build.py
mkdir -p "$work/kvloop/generated"
find kvloop -name '*_pb2*.py' -exec cp --parents -t "$work/kvloop/generated" {} +
tar -C "$work/kvloop" --sort=name -cf - . | xz -9 >"$out/kvloop.tar.xz"
du -bc "$out"/*.tar.xz "$out"/tokenizer*.json
