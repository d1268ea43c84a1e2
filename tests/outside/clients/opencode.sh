#!/bin/sh
# An agent: opencode, as its users start it without a screen. $1: the program.
set -e
export HOME="$PWD"
cat >opencode.json <<JSON
{"provider": {"trained": {"npm": "@ai-sdk/openai-compatible", "models": {"$MODEL": {}},
  "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"}}}}
JSON
exec "$1" run --model "trained/$MODEL" "What is 12 + 30?" </dev/null
