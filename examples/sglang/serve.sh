#!/bin/sh
# SGLang whose pages are kept in this node's store.
#
#   kvstore serve                               # in another terminal
#   examples/sglang/serve.sh MODEL              # on port 30000; further arguments are SGLang's
set -eu

[ $# -ge 1 ] || { echo "usage: $0 MODEL [ARGUMENT…]" >&2; exit 1; }
model=$1
shift
exec "${PYTHON:-python}" -m sglang.launch_server --model-path "$model" --page-size 64 \
  --enable-hierarchical-cache --hicache-io-backend direct --hicache-mem-layout page_first_direct \
  --hicache-storage-prefetch-policy timeout \
  --hicache-storage-backend dynamic \
  --hicache-storage-backend-extra-config "@$(dirname "$0")/hicache.json" "$@"
