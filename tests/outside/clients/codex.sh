#!/bin/sh
# An agent: OpenAI's Codex, as its users start it without a screen. $1: the program.
set -e
export CODEX_HOME="$PWD/.codex"
mkdir "$CODEX_HOME" && git init --quiet .
exec "$1" exec --skip-git-repo-check --sandbox read-only \
  -c model="\"$MODEL\"" -c model_provider='"trained"' \
  -c model_providers.trained="{name=\"trained\", base_url=\"$OPENAI_BASE_URL\", env_key=\"OPENAI_API_KEY\", wire_api=\"responses\"}" \
  "What is 12 + 30?" </dev/null
