#!/bin/sh
# One group by hand: eight answers to one question, and a reward for each. $1 = the server (default: this machine's).
set -eu
server=${1:-http://127.0.0.1:8000}
post() { curl --silent --show-error --fail-with-body "$server$1" -H 'Content-Type: application/json' -d "$2"; }

answer=$(post /v1/chat/completions \
    '{"model": "default", "n": 8, "max_tokens": 8, "messages": [{"role": "user", "content": "Reverse: abcd"}]}')
id=$(printf '%s' "$answer" | sed 's/.*"id": *"\(chatcmpl-[^"]*\)".*/\1/')
rewards=$(printf '%s' "$answer" | grep -o '"content": *"[^"]*"' | awk '{print /"dcba"$/ ? 1 : 0}' | paste -sd, -)
post /v1/rewards "{\"id\": \"$id\", \"rewards\": [$rewards]}"
