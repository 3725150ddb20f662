#!/bin/sh
# vLLM whose blocks are kept in this node's store, and the store's daemon where none runs yet.
#
#   examples/vllm/serve.sh MODEL                # on port 8000; further arguments are vLLM's
#   examples/vllm/serve.sh MODEL --port 8001    # a second engine, which finds what the first has computed
set -eu

[ $# -ge 1 ] || { echo "usage: $0 MODEL [ARGUMENT…]" >&2; exit 1; }
model=$1
shift
here=$(dirname "$0")

# Whatever ends this script ends what it has started.
started=
trap 'kill $started 2>/dev/null || :; wait' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if ! kvstore ping >/dev/null 2>&1; then
  kvstore serve &
  started=$!
fi

# `vllm serve` is the same; this works in environments without that command, too.
python -m vllm.entrypoints.openai.api_server --model "$model" --enable-prompt-tokens-details \
  --kv-transfer-config "$(cat "$here/kvstore.json")" "$@" &
started="$started $!"
wait $!
