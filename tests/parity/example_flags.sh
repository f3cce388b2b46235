#!/bin/sh
# --help of a small example lists its flags, with status 0. An unknown flag, or a missing or invalid value, is
# one sentence on stderr and status 1, and no file is created.
# usage: example_flags.sh path/of/program NAME
. "$(dirname "$0")/../support/train_gpt.sh"
name=$2
before=$(state)

# sentence EXPECTED FLAGS...
sentence() {
    expected=$1
    shift
    output=$(timeout "$limit" "$program" "$@" 2>&1 > /dev/null)
    status=$?
    [ $status -eq 1 ] || fail "$*: status $status: $output"
    [ "$(printf '%s\n' "$output" | wc -l)" -eq 1 ] || fail "$*: not one line: $output"
    case $output in "$name: "*"$expected"*) ;; *) fail "$*: no '$expected' in: $output" ;; esac
    [ "$(state)" = "$before" ] || fail "$*: files changed"
}

help=$(timeout "$limit" "$program" --help) || fail "--help: status $?"
printf '%s\n' "$help" | head -n 1 | grep -q "^$name: " || fail "--help does not begin with the name: $help"
flags=$(printf '%s\n' "$help" | sed -n 's/^  \(--[a-z-]*\) [A-Z].*/\1/p')
switches=$(printf '%s\n' "$help" | sed -n 's/^  \(--[a-z-]*\)  .*/\1/p' | grep -v '^--help$')
[ -n "$flags" ] || fail "--help lists no flag with a value: $help"
sentence "unknown flag --nothing; --help lists the flags" --nothing
sentence "unknown flag -h" -h
for flag in $flags; do
    sentence "$flag needs a value" "$flag"
    printf '%s\n' "$help" | grep -q "^  $flag [NX] " || continue
    for value in x 1y '' nan -1e9 99999999999999999999; do sentence "$flag $value: give a" "$flag" "$value"; done
done
for switch in $switches; do sentence "$switch takes no value" "$switch=1"; done
echo "$name: every wrong flag is one sentence"
