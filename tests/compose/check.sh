#!/usr/bin/env bash
# Brings compose.yaml up with two of each service, then kills a container of each kind in mid-stream.
#
#   tests/compose/check.sh             build, start, check; leaves the project running
#   tests/compose/check.sh --running   check what runs already
#
# By hand, not in `make test`: needs Docker Compose, curl, python3 and root (a container's process is killed from
# outside, as a crash would; `docker kill` would count as a wish and stop the restart policy).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

URL=http://127.0.0.1:${HEADRACE_PORT:-8000}
SCALE=(--scale gpu-worker=2 --scale gateway=2 --scale scheduler=2 --scale cache-store=2)
NUM_STREAMS=${NUM_STREAMS:-4}
NUM_TOKENS=${NUM_TOKENS:-600}
export HEADRACE_THREADS=${HEADRACE_THREADS:-1} # two workers on one machine: threads of both on the same cores wait for each other
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

say() { printf 'check: %3ss %s\n' "$SECONDS" "$*"; }
fail() { say "FAILED: $*"; exit 1; }
text_of() { python3 tests/compose/stream_text.py "$1"; } # exit status 3: the stream has no end

stream() { # NUMBER FILE: one greedy answer, as server-sent events
    curl -sN --max-time 900 "$URL/v1/completions" -H 'Content-Type: application/json' -o "$2" -d "$(printf \
        '{"prompt": "Story number %s. Once upon a time", "max_tokens": %s, "temperature": 0, "ignore_eos": true, "stream": true}' \
        "$1" "$NUM_TOKENS")" || true
}

streams() { # FOLDER: all of them at once, in the background; their pids are in PIDS
    mkdir -p "$WORK/$1"
    PIDS=()
    local number
    for number in $(seq "$NUM_STREAMS"); do
        : >"$WORK/$1/$number"
        stream "$number" "$WORK/$1/$number" &
        PIDS+=($!)
    done
}

wait_for() { # SECONDS DESCRIPTION COMMAND…
    local until=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        [ $SECONDS -lt $until ] || fail "$what"
        sleep 0.2
    done
}

all_streaming() { # FOLDER: every stream has had a few events
    local number
    for number in $(seq "$NUM_STREAMS"); do
        [ "$(grep -c '^data:' "$WORK/$1/$number")" -ge 5 ] || return 1
    done
}

all_healthy() {
    local states
    states=$(docker compose ps -q | xargs docker inspect -f '{{.State.Status}} {{if .State.Health}}{{.State.Health.Status}}{{else}}healthy{{end}}')
    ! grep -qv '^running healthy$' <<<"$states"
}

instances() { # SERVICE METRIC: how many instances of the service have a value above 0
    curl -sf "$URL/metrics" | awk -v service="service=\"$1\"" -v metric="^$2[{]" \
        '$0 ~ metric && index($0, service) && $NF > 0 { match($0, /instance="[^"]*"/); seen[substr($0, RSTART, RLENGTH)] }
         END { for (i in seen) n++; print n + 0 }'
}

two_each() {
    [ "$(instances scheduler headrace_workers_leased)" = 2 ] && [ "$(instances store headrace_pools_leased)" = 2 ] &&
        [ "$(instances worker headrace_generation_tokens_total)" = 2 ] &&
        [ "$(instances gateway headrace_generation_tokens_total)" = 2 ]
}

all_answer() { # the containers' own health is looked at every 15 s; this is what holds now
    all_healthy && curl -sf -o /dev/null "$URL/health/ready" && [ "$(instances worker headrace_worker_kv_blocks)" = 2 ]
}

crash() { # SERVICE INDEX
    kill -KILL "$(docker compose ps -q "$1" | sed -n "$2p" | xargs docker inspect -f '{{.State.Pid}}')"
}

same_as_undisturbed() { # FOLDER
    local number
    for number in $(seq "$NUM_STREAMS"); do
        [ "$(text_of "$WORK/$1/$number")" = "$(cat "$WORK/undisturbed/$number.text")" ] ||
            fail "$1: stream $number is not what it is undisturbed"
    done
}

if [ "${1:-}" != --running ]; then
    say "starting"
    make -s secrets
    docker compose up -d --build "${SCALE[@]}"
fi
wait_for 600 "not everything is up" all_answer
say "up"

streams undisturbed
wait "${PIDS[@]}"
for number in $(seq "$NUM_STREAMS"); do
    text_of "$WORK/undisturbed/$number" >"$WORK/undisturbed/$number.text" || fail "stream $number has no end"
done
say "undisturbed answers are there"

wait_for 60 "the load is not spread over two of each service" two_each
say "two of each service share the load"

for victim in "gpu-worker 1" "gpu-worker 2" "scheduler 1" "cache-store 1" "redis 1"; do
    folder=${victim/ /-}
    streams "$folder"
    wait_for 60 "$folder: the streams do not begin" all_streaming "$folder"
    # shellcheck disable=SC2086
    crash $victim
    wait "${PIDS[@]}"
    same_as_undisturbed "$folder"
    wait_for 300 "$folder does not come back" all_answer
    say "$victim was killed in mid-stream: all answers are as they were undisturbed"
done

streams gateway-1
wait_for 60 "gateway-1: the streams do not begin" all_streaming gateway-1
crash gateway 1
wait "${PIDS[@]}"
broken=0
for number in $(seq "$NUM_STREAMS"); do
    if text=$(text_of "$WORK/gateway-1/$number"); then
        [ "$text" = "$(cat "$WORK/undisturbed/$number.text")" ] || fail "gateway-1: stream $number differs"
    else
        broken=$((broken + 1))
    fi
done
[ $broken -gt 0 ] && [ $broken -lt "$NUM_STREAMS" ] || fail "gateway-1: $broken of $NUM_STREAMS streams broke"
streams after
wait "${PIDS[@]}"
same_as_undisturbed after
wait_for 300 "gateway-1 does not come back" all_answer
say "gateway 1 was killed: its $broken streams broke visibly, the others and new ones are as they were undisturbed"
say "passed"
