#!/bin/sh
# Bad arguments of a small example: exit status 1, one sentence on stderr that contains the expected text, and
# no file created.
# usage: example_bad_input.sh path/of/program "ARGUMENTS|EXPECTED" ...
. "$(dirname "$0")/../support/train_gpt.sh"
shift
before=$(state)
for case in "$@"; do
    expected=${case#*|}
    set -f
    output=$(timeout "$limit" "$program" ${case%%|*} 2>&1 > /dev/null)
    status=$?
    set +f
    [ $status -eq 1 ] || fail "${case%%|*}: status $status: $output"
    [ "$(printf '%s\n' "$output" | wc -l)" -eq 1 ] || fail "${case%%|*}: not one line: $output"
    case $output in *"$expected"*) ;; *) fail "${case%%|*}: no '$expected' in: $output" ;; esac
    [ "$(state)" = "$before" ] || fail "${case%%|*}: files changed"
done
echo "$(basename "$program"): every bad argument is one sentence"
