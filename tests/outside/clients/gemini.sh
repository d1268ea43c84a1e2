#!/bin/sh
# An agent: Google's Gemini CLI, as its users start it without a screen. $1: the program.
set -e
export HOME="$PWD" GEMINI_CLI_TRUST_WORKSPACE=true
mkdir .gemini
cat >.gemini/settings.json <<JSON
{"security": {"auth": {"selectedType": "gemini-api-key"}}, "privacy": {"usageStatisticsEnabled": false}}
JSON
exec "$1" --model "$MODEL" --prompt "What is 12 + 30?" </dev/null
