#!/bin/sh
# A small example prints the same hash in its last line for all these arguments, such as numbers of ranks.
# usage: example_ranks.sh path/of/program "ARGUMENTS OF A RUN" ...
. "$(dirname "$0")/../support/train_gpt.sh"
shift
for run in "$@"; do
    # shellcheck disable=SC2086 # the words of a run are its arguments
    output=$(timeout "$limit" "$program" $run 2>&1) || fail "$run: status $?: $output"
    line=$(printf '%s\n' "$output" | tail -n 1)
    printf '%s\n' "$line" | grep -Eq '[0-9a-f]{16}$' || fail "$run: no hash in the last line: $output"
    [ "${hash:=$line}" = "$line" ] || fail "$run: other bits: $line instead of $hash"
done
echo "the last line is always $hash"
