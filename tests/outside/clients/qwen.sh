#!/bin/sh
# An agent: Qwen Code, as its users start it without a screen. $1: the program.
set -e
export HOME="$PWD" OPENAI_MODEL="$MODEL"
exec "$1" --auth-type openai --prompt "What is 12 + 30?" </dev/null
