#!/bin/sh
# An agent: Pi, as its users start it without a screen. $1: the program.
set -e
export HOME="$PWD" PI_OFFLINE=1
mkdir -p .pi/agent
cat >.pi/agent/models.json <<JSON
{"providers": {"trained": {"baseUrl": "$OPENAI_BASE_URL", "apiKey": "OPENAI_API_KEY", "api": "openai-completions",
  "models": [{"id": "$MODEL"}]}}}
JSON
exec "$1" --provider trained --model "$MODEL" --print "What is 12 + 30?" </dev/null
