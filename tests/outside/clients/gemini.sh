#!/bin/sh
# An agent: Google's Gemini CLI, as its users start it without a screen. $1: the program.
set -e
export HOME="$PWD"
exec "$1" --model "$MODEL" --prompt "What is 12 + 30?" </dev/null
