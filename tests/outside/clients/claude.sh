#!/bin/sh
# An agent: Anthropic's Claude Code, as its users start it without a screen. $1: the program.
set -e
export HOME="$PWD" CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
exec "$1" --print "What is 12 + 30?" --model "$MODEL" </dev/null
