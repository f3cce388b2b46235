#!/bin/sh
# Bad arguments of a small example: exit status 1, one sentence on stderr that contains the expected text, and
# no file created.
# usage: example_bad_input.sh path/of/program "ARGUMENTS|EXPECTED" ...
. "$(dirname "$0")/../support/train_gpt.sh"
shift
before=$(state)
for case in "$@"; do
    set -f
    # shellcheck disable=SC2086 # the words of a case are its arguments
    wrong "${case#*|}" ${case%%|*}
    set +f
done
echo "$(basename "$program"): every bad argument is one sentence"
